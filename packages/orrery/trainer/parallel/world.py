"""Build the device meshes of a trainer's ranks. The last axis is the innermost.

    mesh          dp_replicate × dp_shard × cp       documents, each split over cp ranks
    fsdp_mesh     [dp_replicate ×] fsdp              weights. fsdp = dp_shard · cp
    expert_mesh   dp_replicate × expert_fsdp × ep    experts. expert_fsdp · ep = fsdp

A process ends if a collective fails or exceeds COLLECTIVE_DEADLINE_S · ORRERY_DEADLINE_SCALE.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from orrery.kernels.grouped_matmul import reserve_multiprocessors
from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Mesh
from orrery.runtime.network import name_interface
from orrery.runtime.timing import scaled

if TYPE_CHECKING:
    from orrery.runtime.role_context import RoleContext

COLLECTIVE_DEADLINE_S = 600.0
JOIN_DEADLINE_S = 600.0  # ranks may import slowly before they join
COLLECTIVE_BLOCKS = 16  # our default of NCCL_MAX_CTAS (thread blocks)


@dataclass(frozen=True)
class World:
    """A rank's device, meshes and collectives. On a single rank, collectives are the identity."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None  # None for one rank
    fsdp_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None  # None if ep is 1
    # called after the last collective
    at_end: list[Callable[[], object]] = field(default_factory=list, compare=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        if self.mesh is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def all_gather(self, value: int) -> list[int]:
        if self.mesh is None:
            return [value]
        own = torch.tensor([value], device=self.device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own)
        return [int(one) for one in every]

    def barrier(self) -> None:
        if self.mesh is not None:  # `dist.barrier` would guess the device
            self.sum(torch.zeros(1, device=self.device))

    @property
    def replica(self) -> int:
        return self.axis_rank("dp_replicate")

    @property
    def data_rank(self) -> int:
        shards = self.axis_size("dp_shard")
        return self.axis_rank("dp_replicate") * shards + self.axis_rank("dp_shard")

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh | None:
        if self.expert_mesh is None:
            return None
        if self.axis_size("dp_replicate") > 1:
            return self.expert_mesh["dp_replicate", "expert_fsdp"]
        return self.expert_mesh["expert_fsdp"]

    def axis_size(self, axis: str) -> int:
        mesh = self._mesh_with(axis)
        return 1 if mesh is None else mesh[axis].size()

    def axis_rank(self, axis: str) -> int:
        mesh = self._mesh_with(axis)
        return 0 if mesh is None else mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        mesh = self._mesh_with(axis)
        assert mesh is not None, f"no mesh has an axis {axis!r}"
        return mesh.get_group(axis)

    def _mesh_with(self, axis: str) -> DeviceMesh | None:
        for mesh in (self.mesh, self.fsdp_mesh, self.expert_mesh):
            if mesh is not None and axis in (mesh.mesh_dim_names or ()):
                return mesh
        return None


def device_for(accelerator: str, index: int) -> torch.device:
    if accelerator == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
        return torch.device("cpu")
    # CUDA_VISIBLE_DEVICES may show only this rank's GPU.
    device = torch.device("cuda", index % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device


def init_world(mesh: Mesh, rank: int, device: torch.device, store: dist.Store | None) -> World:
    if store is None:
        return World(rank, 1, device, None)
    name_interface()
    if device.type == "cuda":
        _divide_multiprocessors()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=mesh.world_size,
        timeout=timedelta(seconds=scaled(COLLECTIVE_DEADLINE_S)),
    )
    return make_world(mesh, rank, device)


def _divide_multiprocessors() -> None:
    blocks = os.environ.setdefault("NCCL_MAX_CTAS", str(COLLECTIVE_BLOCKS))
    if not blocks.isdigit():
        raise RunFailed(
            f"NCCL_MAX_CTAS = {blocks!r}: is not a number of thread blocks; unset it, "
            f"or set it to {COLLECTIVE_BLOCKS}"
        )
    reserve_multiprocessors(int(blocks))


def make_world(mesh: Mesh, rank: int, device: torch.device) -> World:
    """Make device meshes. Raise RunFailed if `mesh` needs another number of ranks. A collective."""
    if (found := dist.get_world_size()) != mesh.world_size:
        size = f"dp_replicate·dp_shard·cp = {mesh.world_size}"
        raise RunFailed(f"trainer.mesh: {size}, but this stage has {found} ranks")
    sharded, replicas = mesh.dp_shard * mesh.cp, mesh.dp_replicate

    def axes(**sizes: int) -> DeviceMesh:
        return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    documents = axes(dp_replicate=replicas, dp_shard=mesh.dp_shard, cp=mesh.cp)
    repeated = {"dp_replicate": replicas} if replicas > 1 else {}
    weights = axes(**repeated, fsdp=sharded)
    experts = None
    if mesh.ep > 1:
        experts = axes(dp_replicate=replicas, expert_fsdp=sharded // mesh.ep, ep=mesh.ep)
    return World(rank, mesh.world_size, device, documents, weights, experts)


def open_rendezvous(ctx: "RoleContext", world_size: int) -> dist.Store:
    from orrery.wire import rendezvous

    timeout = timedelta(seconds=scaled(JOIN_DEADLINE_S))
    if ctx.index == 0:
        # An unbound TCPStore would listen on all interfaces.
        listener = socket.create_server((ctx.host, ctx.port))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            ctx.host,
            port,
            world_size,
            True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        rendezvous.publish(ctx, f"tcp://{ctx.host}:{port}")
        return store
    with ctx.health.waiting("the address of trainer.0", deadline_s=scaled(JOIN_DEADLINE_S)):
        first = rendezvous.await_endpoints(ctx, "trainer", 1, scaled(JOIN_DEADLINE_S))[0]
    host, _, port = first.url.removeprefix("tcp://").rpartition(":")
    return dist.TCPStore(
        host, int(port), world_size, False, timeout=timeout, wait_for_workers=False
    )


def destroy_world(world: World) -> None:
    if world.mesh is not None:
        dist.destroy_process_group()


class AsyncCollective(Protocol):
    """A collective that runs beside computation, and one that returns the gradients.

    `is_trained`: which results get gradients.
    """

    is_trained: Sequence[bool]

    def begin(self, tensors: Sequence[Tensor]) -> None: ...

    def end(self) -> tuple[Tensor, ...]: ...

    def begin_back(self, gradients: Sequence[Tensor]) -> None: ...

    def end_back(self) -> Sequence[Tensor | None]:
        """Return the gradients of `begin`'s tensors."""


def send(collective: AsyncCollective, *tensors: Tensor) -> Tensor:
    """Begin the transfer of `tensors`. Return a scalar zero, the ticket, for `receive`.

    The ticket links both in autograd: `receive`'s backward pass runs before this one's.
    """
    return _Send.apply(collective, *tensors)


def receive(collective: AsyncCollective, ticket: Tensor) -> tuple[Tensor, ...]:
    return _Receive.apply(collective, ticket)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: AsyncCollective, *tensors: Tensor) -> Tensor:
        ctx.collective = collective
        collective.begin(tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.collective.end_back()


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: AsyncCollective, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.collective = collective
        results = collective.end()
        untrained = zip(results, collective.is_trained, strict=True)
        ctx.mark_non_differentiable(*(x for x, trains in untrained if not trains))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        ctx.collective.begin_back(gradients)
        return None, gradients[0].new_zeros(())


class RowTransfer:
    """An all-to-all of tensors' rows, in rank order.

    Rank r of `group` gets `sent[r]` rows of each tensor, and sends `arriving[r]` rows here. By
    default, all counts are equal.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sent: list[int] | None = None,
        arriving: list[int] | None = None,
    ) -> None:
        self._group, self._sent, self._arriving = group, sent, arriving
        self.is_trained: Sequence[bool] = ()
        self._results: list[Tensor] = []
        self._works: list[dist.Work] = []

    def begin(self, tensors: Sequence[Tensor]) -> None:
        self.is_trained = [True] * len(tensors)
        self._begin(tensors, self._sent, self._arriving)

    def end(self) -> tuple[Tensor, ...]:
        for work in self._works:
            work.wait()
        results, self._results, self._works = self._results, [], []
        return tuple(results)

    def begin_back(self, gradients: Sequence[Tensor]) -> None:
        self._begin(gradients, self._arriving, self._sent)

    def end_back(self) -> tuple[Tensor, ...]:
        return self.end()

    def _begin(
        self, tensors: Sequence[Tensor], sent: list[int] | None, arriving: list[int] | None
    ) -> None:
        num_rows = None if arriving is None else sum(arriving)
        self._results = [
            x.new_empty(x.shape[0] if num_rows is None else num_rows, *x.shape[1:]) for x in tensors
        ]
        self._works = [
            dist.all_to_all_single(
                into, x.contiguous(), arriving, sent, group=self._group, async_op=True
            )
            for into, x in zip(self._results, tensors, strict=True)
        ]


def all_to_all(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    sent: list[int] | None = None,
    arriving: list[int] | None = None,
) -> tuple[Tensor, ...]:
    """Return the received rows. See `RowTransfer`."""
    transfer = RowTransfer(group, sent, arriving)
    transfer.begin(tensors)
    return transfer.end()


Exchange = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def exchange(there: Exchange, back: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `there(tensors)`. The backward pass calls `back` with the gradients."""
    return _Exchange.apply(there, back, *tensors)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Exchange, back: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return there(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.back(gradients)
