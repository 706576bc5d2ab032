"""The ranks of a trainer and the few collectives it uses by itself.

- One rank: no process group at all; every collective is the identity.
- Several: rank 0 opens a TCPStore at `ctx.host` and publishes its address (`orrery.transport.rendezvous`); gloo on CPU, nccl on GPU,
  both on the interface of `orrery.runtime.network`.
- Three meshes over the same ranks, innermost axis last:
      mesh          dp_replicate × dp_shard × cp            who has which documents, and which part of them
      fsdp_mesh     [dp_replicate ×] fsdp                   weights are sharded over fsdp = dp_shard · cp, repeated over dp_replicate
      expert_mesh   dp_replicate × expert_fsdp × ep         the same for experts, which live on ep ranks; expert_fsdp · ep = fsdp
  So replicas are the same ranks whatever the weight, and the fsdp ranks of one replica hold every weight once.
- The ranks of one cp group have the same documents; `data_rank` counts groups.
- A collective that fails or takes longer than COLLECTIVE_DEADLINE_S (scaled) is the end of the process.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from orrery.kernels.grouped_matmul import reserve_multiprocessors
from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Mesh
from orrery.runtime.network import name_interface
from orrery.runtime.timing import scaled

if TYPE_CHECKING:
    from orrery.runtime.role_context import RoleContext

COLLECTIVE_DEADLINE_S = 600.0
JOIN_DEADLINE_S = 600.0  # between the first rank and the last: each imports torch, some of them from a file system that all are reading
COLLECTIVE_BLOCKS = 16  # multiprocessors that a collective of NCCL may hold; with 8 collectives are what a step waits for


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None  # None: one rank, no process group
    fsdp_mesh: DeviceMesh | None = None  # two axes for HSDP, one where nothing is repeated
    expert_mesh: DeviceMesh | None = None  # None: every rank holds of all experts (ep 1)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place, over all ranks."""
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.mesh is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def all_gather(self, value: int) -> list[int]:
        """`value` of every rank, in rank order."""
        mine = torch.tensor([value], device=self.device)
        if self.mesh is None:
            return [value]
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        return [int(one) for one in every]

    def barrier(self) -> None:
        if self.mesh is not None:
            self.sum(
                torch.zeros(1, device=self.device)
            )  # gloo's and nccl's barriers guess the device; a sum does not

    @property
    def replica(self) -> int:
        """Which copy of the weights, of experts too, this rank has a part of."""
        return self.axis_rank("dp_replicate")

    @property
    def data_rank(self) -> int:
        return self.axis_rank("dp_replicate") * self.axis_size("dp_shard") + self.axis_rank(
            "dp_shard"
        )

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh | None:
        """`fsdp_mesh` of what has been spread over ep ranks already."""
        if self.expert_mesh is None:
            return None
        repeated = self.axis_size("dp_replicate") > 1
        return (
            self.expert_mesh["dp_replicate", "expert_fsdp"]
            if repeated
            else self.expert_mesh["expert_fsdp"]
        )

    def axis_size(self, axis: str) -> int:
        mesh = self._mesh_with(axis)
        return 1 if mesh is None else mesh[axis].size()

    def axis_rank(self, axis: str) -> int:
        mesh = self._mesh_with(axis)
        return 0 if mesh is None else mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks along `axis` through this one; there must be a mesh that has it."""
        mesh = self._mesh_with(axis)
        assert mesh is not None, f"no mesh has an axis {axis!r}"
        return mesh.get_group(axis)

    def _mesh_with(self, axis: str) -> DeviceMesh | None:
        meshes = (self.mesh, self.fsdp_mesh, self.expert_mesh)
        return next(
            (mesh for mesh in meshes if mesh is not None and axis in (mesh.mesh_dim_names or ())),
            None,
        )


def device_for(accelerator: str, index: int) -> torch.device:
    """CPU, with one thread a rank unless OMP_NUM_THREADS says otherwise; or the CUDA device of this rank."""
    if accelerator == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
        return torch.device("cpu")
    # The launcher shows each process only its own devices (CUDA_VISIBLE_DEVICES), so ordinals start from 0 again.
    device = torch.device("cuda", index % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device


def init_world(mesh: Mesh, rank: int, device: torch.device, store: dist.Store | None) -> World:
    """The world of `mesh.world_size` ranks; `store` is where they meet (None with one rank that needs no process group)."""
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
    """Collectives keep to few multiprocessors, and grouped products leave those. NCCL_MAX_CTAS, where it is set, stays as it is."""
    blocks = os.environ.setdefault("NCCL_MAX_CTAS", str(COLLECTIVE_BLOCKS))
    if not blocks.isdigit():
        raise RunFailed(
            f"NCCL_MAX_CTAS = {blocks!r}: is no number of multiprocessors; unset it, or set it to {COLLECTIVE_BLOCKS}"
        )
    reserve_multiprocessors(int(blocks))


def make_world(mesh: Mesh, rank: int, device: torch.device) -> World:
    """The meshes of `mesh` over all ranks of the process group, which must be as many. A collective."""
    if (found := dist.get_world_size()) != mesh.world_size:
        raise RunFailed(
            f"trainer.mesh: dp_replicate·dp_shard·cp = {mesh.world_size}, but {found} ranks are here"
        )
    sharded = mesh.dp_shard * mesh.cp

    def axes(**sizes: int) -> DeviceMesh:
        return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    return World(
        rank,
        mesh.world_size,
        device,
        axes(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=mesh.cp),
        axes(dp_replicate=mesh.dp_replicate, fsdp=sharded)
        if mesh.dp_replicate > 1
        else axes(fsdp=sharded),
        axes(dp_replicate=mesh.dp_replicate, expert_fsdp=sharded // mesh.ep, ep=mesh.ep)
        if mesh.ep > 1
        else None,
    )


def open_rendezvous(ctx: "RoleContext", world_size: int) -> dist.Store:
    """The TCPStore of this stage's trainer ranks: rank 0 serves it, the others find it by its published address."""
    from orrery.transport import rendezvous

    timeout = timedelta(seconds=scaled(JOIN_DEADLINE_S))
    if ctx.index == 0:
        listener = socket.create_server((ctx.host, ctx.port))
        port = listener.getsockname()[1]
        # Handing over a bound socket is the only way to keep TCPStore off the other interfaces.
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
