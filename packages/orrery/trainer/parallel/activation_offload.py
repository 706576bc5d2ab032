"""Move tensors saved for the backward pass to pinned host memory.

While a block computes, tensors of up to `max_in_flight` other blocks move to the host or back.
The device keeps weights (also in FP8), small and non-dense tensors, arguments shared by blocks, and
the last block's tensors.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from orrery.manifest.schema import Trainer
from orrery.models.fp8 import products
from orrery.models.placement import local_tensor
from orrery.trainer.parallel import blocks
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy

MIN_BYTES = 1 << 20


def apply(policy: Policy, world: World, trainer: Trainer, min_bytes: int = MIN_BYTES) -> None:
    if not trainer.memory.activation_offload:
        return
    in_flight = trainer.memory.activation_offload_max_in_flight
    offload = ActivationOffload(world.device, min_bytes, in_flight)
    for block in list(policy.network.layers)[:-1]:
        block.forward = partial(offload.run, block, block.forward)


class HostBufferPool:
    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self.num_bytes = 0

    def take(self, num_bytes: int) -> tuple[Tensor, Any]:
        """Return a buffer of at least `num_bytes`, and an event to await before writing to it."""
        size = 1 << (num_bytes - 1).bit_length()
        if self._free[size]:
            return self._free[size].pop()
        self.num_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned), None

    def give(self, buffer: Tensor, last_read: Any) -> None:
        self._free[buffer.numel()].append((buffer, last_read))


class OffloadedTensor:
    """`device_tensor` is None while only the host has the data."""

    def __init__(self, owner: "BlockActivations", tensor: Tensor):
        self.owner, self.dtype = owner, tensor.dtype
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.buffer: Tensor | None = None
        self.device_tensor: Tensor | None = tensor

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view_of(self, flat: Tensor) -> Tensor:
        return flat[: self.num_bytes].view(self.dtype).as_strided(self.shape, self.stride)


class BlockActivations:
    def __init__(self, previous: "BlockActivations | None"):
        self.previous = previous
        self.saved: dict[tuple, OffloadedTensor] = {}
        self.copied_out: Any = None
        self.copied_in: Any = None
        self.is_fetched = False


class ActivationOffload:
    def __init__(self, device: torch.device, min_bytes: int, max_in_flight: int = 1):
        self.device, self.min_bytes, self.max_in_flight = device, min_bytes, max_in_flight
        on_gpu = device.type == "cuda"
        self.pool = HostBufferPool(pinned=on_gpu)
        self._out = torch.cuda.Stream(device) if on_gpu else None
        self._in = torch.cuda.Stream(device) if on_gpu else None
        self._last: BlockActivations | None = None
        self._leaving: deque[BlockActivations] = deque()

    def run(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        activations = BlockActivations(self._last)
        leaves = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
        leaves += [part for parts, _ in products(block) for part in parts]
        shared = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        pack = partial(self._pack, activations, block, shared)
        with (
            saved_tensors_hooks(pack, self._unpack),
            blocks.store_results_with(pack, self._unpack),
        ):
            result = forward(*args, **kwargs)
        if activations.saved:
            self._send(activations)
            self._leaving.append(activations)
            if len(self._leaving) > self.max_in_flight:
                self._free(self._leaving.popleft())
            self._last = activations
        return result

    def _pack(
        self, activations: BlockActivations, block: nn.Module, shared: set[int], tensor: Tensor
    ) -> "OffloadedTensor | Tensor":
        is_small = tensor.numel() * tensor.itemsize < self.min_bytes
        if tensor.device != self.device or is_small or isinstance(tensor, nn.Parameter):
            return tensor
        if not _is_dense(tensor):
            return tensor
        storage = tensor.untyped_storage().data_ptr()
        weights = (
            local_tensor(weight).untyped_storage().data_ptr() for weight in block.parameters()
        )
        if storage in shared or storage in weights:
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        return activations.saved.setdefault(key, OffloadedTensor(activations, tensor.detach()))

    def _send(self, activations: BlockActivations) -> None:
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            for saved in activations.saved.values():
                assert saved.device_tensor is not None
                saved.buffer, read = self.pool.take(saved.num_bytes)
                if self._out is not None and read is not None:
                    self._out.wait_event(read)
                saved.view_of(saved.buffer).copy_(saved.device_tensor, non_blocking=True)
        if self._out is not None:
            activations.copied_out = self._out.record_event()

    def _free(self, activations: BlockActivations) -> None:
        if activations.is_fetched:
            return
        if activations.copied_out is not None:
            torch.cuda.current_stream(self.device).wait_event(activations.copied_out)
        for saved in activations.saved.values():
            saved.device_tensor = None

    def _unpack(self, saved: "OffloadedTensor | Tensor") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        owner = saved.owner
        self._last = None
        self._leaving.clear()
        self._fetch(owner)
        before = owner.previous
        for _ in range(self.max_in_flight):
            if before is not None:
                self._fetch(before)
                before = before.previous
        owner.previous = None
        if owner.copied_in is not None:
            torch.cuda.current_stream(self.device).wait_event(owner.copied_in)
        assert saved.device_tensor is not None
        return saved.device_tensor

    def _fetch(self, activations: BlockActivations) -> None:
        if activations.is_fetched:
            return
        activations.is_fetched = True
        if self._in is not None:
            # `flat` may reuse memory that the current stream still uses.
            self._in.wait_stream(torch.cuda.current_stream(self.device))
            self._in.wait_event(activations.copied_out)
        for saved in activations.saved.values():
            if saved.device_tensor is not None:
                continue
            assert saved.buffer is not None
            flat = torch.empty(saved.num_bytes, dtype=torch.uint8, device=self.device)
            with torch.cuda.stream(self._in):
                flat.copy_(saved.buffer[: saved.num_bytes], non_blocking=True)
            saved.device_tensor = saved.view_of(flat)
        if self._in is not None:
            activations.copied_in = self._in.record_event()
        for saved in activations.saved.values():
            assert saved.buffer is not None
            self.pool.give(saved.buffer, activations.copied_in)
            saved.buffer = None
        activations.saved = {}


def _is_dense(tensor: Tensor) -> bool:
    """Return whether elements fill memory without gaps."""
    if not tensor.numel():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
