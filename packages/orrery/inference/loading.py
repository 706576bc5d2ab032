"""Copy received slices into vLLM's layers, and process each complete layer.

- vLLM's layerwise reload repacks or quantizes a layer, and copies it to the addresses that CUDA
  graphs use. So only one layer at a time exists twice.
- Adjacent slices, and slices at equal distances (experts), are copied at once.
"""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from orrery.inference.needs import Destination, Needs
from orrery.wire.weight_wire.buckets import in_bucket
from orrery.wire.weight_wire.plan import Slice, TensorInfo, dtype_of, intersection, shape_of


class Run(NamedTuple):
    """A copy from byte `begin` of a bucket to element `offset` of a parameter."""

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
        """Return the copy in 8-byte words if they fit, or self. A GPU copies rows by element."""
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


WORD = torch.int64


def runs(slices: list[Slice], needs: Needs, tensors: dict[str, TensorInfo]) -> list[Run]:
    """Return the copies for these slices of one bucket."""
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
    """Merge copies of equal shape at equal distances, such as a layer's experts."""
    series: list[list[Run]] = []
    latest: dict[tuple[Any, ...], list[Run]] = {}  # by common fields
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
        """Call `initialize_layerwise_reload` on the model first."""
        self._layers = dict(model.named_modules())
        self._needs = needs
        self._missing: dict[str, int] = defaultdict(int)  # elements, by layer
        for destinations in needs.destinations.values():
            for each in destinations:
                self._missing[each.layer] += math.prod(shape_of(each.box))
        self._begun: set[str] = set()

    @torch.no_grad()
    def load(self, copies: list[Run], bucket: torch.Tensor) -> None:
        """Copy from `bucket` (u8), and process each complete layer."""
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
        """Raise ValueError with the name of an incomplete layer."""
        for path, missing in sorted(self._missing.items()):
            if missing:
                raise ValueError(f"layer {path!r} lacks {missing} elements")

    def _begin(self, path: str, layer: torch.nn.Module) -> None:
        self._begun.add(path)
        materialize_layer(layer, layerwise.get_layerwise_info(layer))
        for each in self._needs.fillings.get(path, ()):
            parameter = getattr(layer, each.parameter).data
            parameter.as_strided(each.shape, each.strides, each.offset).fill_(each.value)
