"""Activation offload: what a block keeps for its backward pass waits in pinned host memory, autograd's and selective checkpointing's.

    forward    block i computes | copies out of block i − 1 run beside it
    backward   block i computes | copies in of block i − 1 run beside it

- A copy runs on a stream of its own, one for each direction. Compute waits for a copy only where it overtakes it; a tensor's device memory
  is let go when the block after it has been enqueued and its copy is done, so that two blocks' worth is on the device at most.
- Host buffers are taken from a pool and go back to it: nothing is pinned anew after the first steps. Their sizes are powers of two, as
  torch's pinned blocks are anyway: micro-batches of other lengths find buffers that fit, and the pool stays as large as the largest need.
- Left on the device: weights, what all blocks share (angles, routes), tensors below MIN_BYTES, those that are strided with gaps, and
  the last block's, which the backward pass reads at once.
- On a CPU the same steps run without streams: the results are the same bits with and without offload, there and on a GPU.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from orrery.manifest.schema import Trainer
from orrery.models.placement import local_tensor
from orrery.trainer.parallel import recomputation
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy

MIN_BYTES = 1 << 20


def apply(policy: Policy, world: World, trainer: Trainer, min_bytes: int = MIN_BYTES) -> None:
    if not trainer.memory.activation_offload:
        return
    offload = Offload(world.device, min_bytes)
    for block in list(policy.network.layers)[:-1]:
        block.forward = partial(offload.run, block, block.forward)


class Pool:
    """Host buffers, of powers of two bytes. One that comes back is written again only after `free`, the event of its last reader."""

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self.num_bytes = 0  # ever made

    def take(self, num_bytes: int) -> tuple[Tensor, Any]:
        """A buffer of at least `num_bytes`, and the event to wait for before it is written."""
        size = 1 << (num_bytes - 1).bit_length()
        if self._free[size]:
            return self._free[size].pop()
        self.num_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned), None

    def give(self, buffer: Tensor, free: Any) -> None:
        self._free[buffer.numel()].append((buffer, free))


class Saved:
    """One tensor that is away."""

    def __init__(self, group: "Group", tensor: Tensor):
        self.group, self.shape, self.stride, self.dtype = (
            group,
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        self.buffer: Tensor | None = None
        self.device_tensor: Tensor | None = tensor  # until it is away, and again when it is back

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def typed(self, flat: Tensor) -> Tensor:
        return flat[: self.num_bytes].view(self.dtype).as_strided(self.shape, self.stride)


class Group:
    """What one block keeps in one forward pass; `previous` is what the block before it kept."""

    def __init__(self, previous: "Group | None"):
        self.previous = previous
        self.saved: dict[tuple, Saved] = {}
        self.out: Any = None  # event: all copies out are done
        self.back: Any = None  # event: all copies in are done
        self.is_fetched = False


class Offload:
    def __init__(self, device: torch.device, min_bytes: int):
        self.device, self.min_bytes = device, min_bytes
        on_gpu = device.type == "cuda"
        self.pool = Pool(pinned=on_gpu)
        self._out, self._in = (
            (torch.cuda.Stream(device), torch.cuda.Stream(device)) if on_gpu else (None, None)
        )
        self._last: Group | None = (
            None  # the newest group whose tensors may still be on their way out
        )

    def run(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`forward(*args)` whose saved tensors are away when the next block has run."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        group = Group(self._last)
        shared = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args[1:], kwargs))
            if isinstance(leaf, Tensor)
        }
        pack = partial(self._pack, group, block, shared)
        with (
            saved_tensors_hooks(pack, self._unpack),
            recomputation.setting_aside(pack, self._unpack),
        ):
            result = forward(*args, **kwargs)
        if group.saved:
            self._send(group)
            self._let_go(self._last)
            self._last = group
        return result

    def _pack(
        self, group: Group, block: nn.Module, shared: set[int], tensor: Tensor
    ) -> "Saved | Tensor":
        num_bytes = tensor.numel() * tensor.itemsize
        if (
            tensor.device != self.device
            or num_bytes < self.min_bytes
            or not _is_dense(tensor)
            or isinstance(tensor, nn.Parameter)
        ):
            return tensor
        storage = tensor.untyped_storage().data_ptr()
        # Weights of experts that are spread over ranks are DTensors outside of the experts' own forward: those have no storage.
        if storage in shared or any(
            storage == local_tensor(weight).untyped_storage().data_ptr()
            for weight in block.parameters()
        ):
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        return group.saved.setdefault(key, Saved(group, tensor.detach()))

    def _send(self, group: Group) -> None:
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            for saved in group.saved.values():
                assert saved.device_tensor is not None
                saved.buffer, free = self.pool.take(saved.num_bytes)
                if free is not None:
                    self._out.wait_event(free)
                saved.typed(saved.buffer).copy_(saved.device_tensor, non_blocking=True)
        if self._out is not None:
            group.out = self._out.record_event()

    def _let_go(self, group: Group | None) -> None:
        """Free the device memory of what `group` sent out."""
        if group is None or group.is_fetched:
            return
        if group.out is not None:
            torch.cuda.current_stream(self.device).wait_event(group.out)
        for saved in group.saved.values():
            saved.device_tensor = None

    def _unpack(self, saved: "Saved | Tensor") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        group = saved.group
        self._last = (
            None  # the backward pass has begun: the next forward pass starts a chain of its own
        )
        self._fetch(group)
        if group.previous is not None:
            self._fetch(group.previous)
            group.previous = None
        if group.back is not None:
            torch.cuda.current_stream(self.device).wait_event(group.back)
        assert saved.device_tensor is not None
        return saved.device_tensor

    def _fetch(self, group: Group) -> None:
        if group.is_fetched:
            return
        group.is_fetched = True
        if self._in is not None:
            self._in.wait_stream(
                torch.cuda.current_stream(self.device)
            )  # whose memory the new tensors may have been
            self._in.wait_event(group.out)
        away = [saved for saved in group.saved.values() if saved.device_tensor is None]
        for saved in away:
            assert saved.buffer is not None
            flat = torch.empty(saved.num_bytes, dtype=torch.uint8, device=self.device)
            with torch.cuda.stream(self._in):
                flat.copy_(saved.buffer[: saved.num_bytes], non_blocking=True)
            saved.device_tensor = saved.typed(flat)
        if self._in is not None:
            group.back = self._in.record_event()
        for saved in group.saved.values():
            assert saved.buffer is not None
            self.pool.give(saved.buffer, group.back)
            saved.buffer = None
        group.saved = {}  # autograd holds what it still needs


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0
