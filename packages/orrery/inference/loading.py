"""Find the weight slices that this engine rank needs, and copy them into vLLM's layers.

- `learn` records the boxes that the model's `load_weights` copies. A box is an index range (start,
  stop) per dimension.
- `Loading` passes complete layers to vLLM's layerwise reload, which keeps the addresses that CUDA
  graphs use.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import (
    materialize_layer,
    restore_layer_on_meta,
)
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_size,
    get_layer_tensors,
)

from orrery.wire.weight_wire.plan import (
    Box,
    Slice,
    TensorInfo,
    dtype_of,
    in_bucket,
    intersection,
    shape_of,
)

WORD = torch.int64


@dataclass(frozen=True)
class Destination:
    """A copy of region `box` of tensor `name` into `parameter` of `layer`.

    Box element (i, j, …) goes to parameter element `offset + i·strides[0] + j·strides[1] + …`.
    """

    name: str
    box: Box
    layer: str
    parameter: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Filling:
    """A parameter's region that the model's loader sets to a constant."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    value: float


@dataclass
class Needs:
    destinations: dict[str, list[Destination]] = field(default_factory=dict)
    fillings: dict[str, list[Filling]] = field(default_factory=dict)


def learn(model: Any, tensors: list[TensorInfo]) -> Needs:
    """Return the slices that `model` loads, without changing the model.

    Raise ValueError if a layer gets only some of its elements, or its loader does more than copy
    slices and set constants.
    """
    with _without_storage(model) as owners:
        recorder = _Recorder(owners)
        with recorder:
            model.load_weights((each.name, recorder.source(each)) for each in tensors)
        for path, layer in model.named_modules():
            copied, total = recorder.num_copied.get(path, 0), get_layer_size(layer)
            is_padded = isinstance(layer, VocabParallelEmbedding)
            if 0 < copied < total and not is_padded:
                raise ValueError(
                    f"layer {path!r} would get {copied} of {total} elements from the published "
                    "weights"
                )
    return recorder.needs


@contextmanager
def _without_storage(model: Any) -> Iterator[dict[int, tuple[str, str]]]:
    """Keep parameters on the meta device in the `with` body, in their shapes before repacking.

    Yield {storage address: (layer name, parameter name)}.
    """
    try:
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            restore_layer_on_meta(layer, info)
            for tensor in get_layer_tensors(layer).values():
                loader = layerwise._get_original_loader(tensor)
                if layerwise._get_weight_loader(tensor) is not loader:
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
    """Undo `initialize_layerwise_reload` or `_without_storage`. Call this before any loading."""
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
        # By storage address, which no other tensor gets while the meta tensor exists.
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
                f"{parameter!r} of layer {layer!r}: it repeats an element of {tensor.name!r}, "
                "so it is no slice; set transport.weights to 'files'"
            )
        box, strides = as_box(tuple(tensor.shape), of, into, tensor.name)
        self.needs.destinations.setdefault(tensor.name, []).append(
            Destination(tensor.name, box, layer, parameter, into.storage_offset(), strides)
        )
        self.num_copied[layer] = self.num_copied.get(layer, 0) + of.numel()


def as_box(
    shape: tuple[int, ...], of: torch.Tensor, into: torch.Tensor, name: str
) -> tuple[Box, tuple[int, ...]]:
    """Return the box that `of` selects from tensor `name`, and `into`'s stride per box dimension.

    `of` is a view of the tensor, which is dense and has `shape`. `into` is the destination of its
    elements. Raise ValueError if the elements of `of` form no box.
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
                f"tensor {name!r}: its loader takes elements that form no box; "
                "set transport.weights to 'files'"
            )
        if starts[dim] + n > shape[dim]:
            dims.append((n // shape[dim], s * shape[dim], t * shape[dim]))
            n = shape[dim]
        sizes[dim], strides[dim] = n, t
    box = tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
    return box, tuple(strides)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Run(NamedTuple):
    """A copy from byte `begin` of a bucket (received bytes) to element `offset` of a parameter."""

    layer: str
    parameter: str
    begin: int
    offset: int
    shape: tuple[int, ...]
    bucket_strides: tuple[int, ...]  # in elements
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def in_words(self) -> "Run":
        size = WORD.itemsize // self.dtype.itemsize
        numbers = (
            self.begin // self.dtype.itemsize,
            self.offset,
            self.shape[-1],
            *self.bucket_strides[:-1],
            *self.strides[:-1],
        )
        is_by_rows = len(self.shape) > 1 and self.bucket_strides[-1] == self.strides[-1] == 1
        if not is_by_rows or any(number % size for number in numbers):
            return self
        bucket_strides, strides = (
            (*(stride // size for stride in every[:-1]), 1)
            for every in (self.bucket_strides, self.strides)
        )
        shape = (*self.shape[:-1], self.shape[-1] // size)
        return self._replace(
            offset=self.offset // size,
            shape=shape,
            bucket_strides=bucket_strides,
            strides=strides,
            dtype=WORD,
        )


def runs(slices: list[Slice], needs: Needs, tensors: dict[str, TensorInfo]) -> list[Run]:
    found: list[Run] = []
    for name, box, begin in slices:
        for destination in needs.destinations[name]:
            if intersection(destination.box, box) != box:
                continue
            run = _run(destination, shape_of(box), box, begin, dtype_of(tensors[name]))
            last = found[-1] if found else None
            if last is not None and _follows(last, run):
                found[-1] = last._replace(shape=(last.shape[0] + run.shape[0],))
            else:
                found.append(run)
    return _evenly(found)


def _run(to: Destination, shape: tuple[int, ...], box: Any, begin: int, dtype: torch.dtype) -> Run:
    offset = to.offset + sum(
        (start - first) * stride
        for (start, _), (first, _), stride in zip(box, to.box, to.strides, strict=True)
    )
    dense = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    dims = zip(shape, to.strides, dense, strict=True)
    if any(size > 1 and stride != each for size, stride, each in dims):
        return Run(to.layer, to.parameter, begin, offset, shape, dense, to.strides, dtype)
    return Run(to.layer, to.parameter, begin, offset, (math.prod(shape),), (1,), (1,), dtype)


def _follows(last: Run, run: Run) -> bool:
    dense = last.strides == run.strides == (1,) and len(last.shape) == len(run.shape) == 1
    same = (last.layer, last.parameter, last.dtype) == (run.layer, run.parameter, run.dtype)
    end, end_byte = last.offset + last.shape[0], last.begin + last.shape[0] * last.dtype.itemsize
    return dense and same and (end, end_byte) == (run.offset, run.begin)


def _evenly(found: list[Run]) -> list[Run]:
    """Merge copy operations of equal shape at equal distances, such as a layer's experts'."""
    series: list[list[Run]] = []
    latest: dict[tuple[Any, ...], list[Run]] = {}
    for run in found:
        alike = (run.layer, run.parameter, run.shape, run.bucket_strides, run.strides, run.dtype)
        before = latest.get(alike)
        step = (0, 0) if before is None else _step(before[-1], run)
        if before and min(step) > 0 and (len(before) == 1 or _step(*before[-2:]) == step):
            before.append(run)
        else:
            latest[alike] = [run]
            series.append(latest[alike])
    return [one[0] if len(one) == 1 else _whole(one) for one in series]


def _step(one: Run, next_: Run) -> tuple[int, int]:
    return next_.begin - one.begin, next_.offset - one.offset


def _whole(series: list[Run]) -> Run:
    first, (num_bytes, elements) = series[0], _step(*series[:2])
    return first._replace(
        shape=(len(series), *first.shape),
        bucket_strides=(num_bytes // first.dtype.itemsize, *first.bucket_strides),
        strides=(elements, *first.strides),
    )


class Loading:
    def __init__(self, model: torch.nn.Module, needs: Needs) -> None:
        """Call `initialize_layerwise_reload(model)` before this."""
        self._layers = dict(model.named_modules())
        self._needs = needs
        self._missing: dict[str, int] = defaultdict(int)  # elements by layer
        for destinations in needs.destinations.values():
            for each in destinations:
                self._missing[each.layer] += math.prod(shape_of(each.box))
        self._begun: set[str] = set()

    @torch.no_grad()
    def load(self, copies: list[Run], bucket: torch.Tensor) -> None:
        """Copy from `bucket`, u8[bytes]. Let vLLM process each completed layer."""
        for run in copies:
            layer = self._layers[run.layer]
            if run.layer not in self._begun:
                self._begin(run.layer, layer)
            into = getattr(layer, run.parameter).data
            self._missing[run.layer] -= math.prod(run.shape)
            is_dense = into.dtype == run.dtype and into.is_contiguous()
            fits = is_dense and into.nbytes % WORD.itemsize == 0
            if fits and (words := run.in_words) is not run:
                run, into = words, into.view(-1).view(WORD)
            dims = zip(run.shape, run.bucket_strides, strict=True)
            size = 1 + sum((number - 1) * stride for number, stride in dims)
            source = in_bucket(bucket, run.begin, (size,), run.dtype)
            source = source.as_strided(run.shape, run.bucket_strides)
            into.as_strided(run.shape, run.strides, run.offset).copy_(source)
            if not self._missing[run.layer]:
                layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))

    def check(self) -> None:
        for path, missing in sorted(self._missing.items()):
            if missing:
                raise ValueError(f"layer {path!r} lacks {missing} elements")

    def _begin(self, path: str, layer: torch.nn.Module) -> None:
        self._begun.add(path)
        materialize_layer(layer, layerwise.get_layerwise_info(layer))
        for each in self._needs.fillings.get(path, ()):
            parameter = getattr(layer, each.parameter).data
            parameter.as_strided(each.shape, each.strides, each.offset).fill_(each.value)
