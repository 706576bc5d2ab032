"""Find the slices of published tensors that this engine rank needs, by vLLM's own loaders.

The model's `load_weights` runs once on parameters without storage, and its copies are recorded.
This works for every parallelism, fusion and model of vLLM. (vLLM's `sharded_rdt` needs Ray. Its
`nccl_m2n` sends whole tensors if parameters are fused.)

- Slices are boxes. An error names a loader that calculates with its input or picks single rows.
- Constants that a loader writes, such as a vocabulary's padding, are recorded too.
- The model is unchanged afterwards.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_size,
    get_layer_tensors,
)

from orrery.wire.weight_wire.plan import Box, TensorInfo, dtype_of


@dataclass(frozen=True)
class Destination:
    """A copy of `box` of tensor `name` to `parameter` of `layer`: element (i, j, …) goes to element
    `offset + Σ i · strides`.
    """

    name: str
    box: Box
    layer: str
    parameter: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Filling:
    """A region of a parameter that loaders set to a constant."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    value: float


@dataclass
class Needs:
    destinations: dict[str, list[Destination]] = field(default_factory=dict)  # by tensor
    fillings: dict[str, list[Filling]] = field(default_factory=dict)  # by layer


def learn(model: Any, tensors: list[TensorInfo]) -> Needs:
    """Return the slices that `model` takes. Raise ValueError by name if a layer gets only a part or
    a loader is not understood.
    """
    with _without_storage(model) as owners:
        recorder = _Recorder(owners)
        with recorder:
            model.load_weights((each.name, recorder.source(each)) for each in tensors)
        for path, layer in model.named_modules():
            copied, total = recorder.num_copied.get(path, 0), get_layer_size(layer)
            is_padded = isinstance(layer, VocabParallelEmbedding)  # its padding is never loaded
            if 0 < copied < total and not is_padded:
                raise ValueError(
                    f"layer {path!r} would get {copied} of {total} elements from the published "
                    "weights"
                )
    return recorder.needs


@contextmanager
def _without_storage(model: Any) -> Iterator[dict[int, tuple[str, str]]]:
    """Put parameters, as before processing, on the meta device. Yield (layer, parameter) by
    storage.
    """
    try:
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            restore_layer_on_meta(layer, info)
            for tensor in get_layer_tensors(layer).values():
                loader = layerwise._get_original_loader(tensor)
                if layerwise._get_weight_loader(tensor) is not loader:  # wrapped by a reload
                    tensor.weight_loader = loader
        yield {
            _storage(tensor): (path, name)
            for path, layer in model.named_modules()
            for group in get_layer_params_buffers(layer)
            for name, tensor in group.items()
        }
    finally:
        put_back(model)


def put_back(model: Any) -> None:
    """Undo `initialize_layerwise_reload` or `_without_storage`, before any tensor is loaded."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


class _Recorder(TorchDispatchMode):
    def __init__(self, owners: Mapping[int, tuple[str, str]]) -> None:
        super().__init__()
        self.needs = Needs()
        self.num_copied: dict[str, int] = {}
        self._owners = owners
        # By storage. Keeping the tensor prevents reuse of its storage's address.
        self._sources: dict[int, tuple[TensorInfo, torch.Tensor]] = {}

    def source(self, tensor: TensorInfo) -> torch.Tensor:
        empty = torch.empty(tensor.shape, dtype=dtype_of(tensor), device="meta")
        self._sources[_storage(empty)] = (tensor, empty)
        return empty

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            into, of = args[0], args[1]
            owner = self._owners.get(_storage(into))
            if owner is not None:
                source = self._sources.get(_storage(of))
                if source is None:
                    raise ValueError(
                        f"{owner[1]!r} of layer {owner[0]!r}: its loader computes with values, "
                        "so its slice is unknown; set transport.weights to 'files'"
                    )
                self._copy(source[0], of, into, *owner)
                return into
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            owner = self._owners.get(_storage(args[0]))
            if owner is not None:
                value = float(args[1]) if len(args) > 1 else 0.0
                region = args[0]
                shape, strides = tuple(region.shape), tuple(region.stride())
                filling = Filling(owner[1], region.storage_offset(), shape, strides, value)
                self.needs.fillings.setdefault(owner[0], []).append(filling)
                return region
        return func(*args, **(kwargs or {}))

    def _copy(
        self, tensor: TensorInfo, of: torch.Tensor, into: torch.Tensor, layer: str, parameter: str
    ) -> None:
        if of.shape != into.shape:
            of, into = torch.broadcast_tensors(of, into) if of.numel() == into.numel() else (of, of)
        if of is into:
            raise ValueError(
                f"{parameter!r} of layer {layer!r}: it has one element of {tensor.name!r} several "
                "times, so it is no slice; set transport.weights to 'files'"
            )
        box, strides = as_box(tuple(tensor.shape), of, into, tensor.name)
        self.needs.destinations.setdefault(tensor.name, []).append(
            Destination(tensor.name, box, layer, parameter, into.storage_offset(), strides)
        )
        self.num_copied[layer] = self.num_copied.get(layer, 0) + of.numel()


def as_box(
    shape: tuple[int, ...], of: torch.Tensor, into: torch.Tensor, name: str
) -> tuple[Box, tuple[int, ...]]:
    """Return the view `of` as a box of a dense tensor of `shape`, and the strides of `into`.

    Raise ValueError if it is no box.
    """
    full: list[int] = []
    stride = 1
    for size in reversed(shape):
        full.insert(0, stride)
        stride *= size
    starts, rest = [], of.storage_offset()
    for each, size in zip(full, shape, strict=True):
        starts.append(rest // each if size else 0)
        rest -= starts[-1] * each
    sizes, strides = [1] * len(shape), [0] * len(shape)
    views = zip(of.shape, of.stride(), into.stride(), strict=True)
    dims = [(n, s, t) for n, s, t in views if n != 1]
    while dims:
        n, s, t = dims.pop()
        free = (d for d, each in enumerate(full) if each == s and sizes[d] == 1 and shape[d] > 1)
        dim = next(free, None)
        if dim is None or (starts[dim] + n > shape[dim] and (starts[dim] or n % shape[dim])):
            raise ValueError(
                f"tensor {name!r}: its loader takes elements of it that are no box; "
                "set transport.weights to 'files'"
            )
        if starts[dim] + n > shape[dim]:  # the view merges dimensions
            dims.append((n // shape[dim], s * shape[dim], t * shape[dim]))
            n = shape[dim]
        sizes[dim], strides[dim] = n, t
    box = tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
    return box, tuple(strides)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
