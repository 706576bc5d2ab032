"""Send weights in FP8: e4m3 values, and a float32 scale per block of 128 × 128.

- Matrix `x` is sent as tensors `x` and `x` + SCALE.
- The engine decodes `x` to bfloat16, and its model quantizes it to FP8 again. This restores values
  and scales exactly (see the README).
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema.model import FP8_BLOCK
from orrery.wire.weight_wire.plan import (
    Box,
    Slice,
    TensorInfo,
    aligned_bytes,
    in_bucket,
    shape_of,
    starts_of,
)

SCALE = "_scale_inv"
DTYPE = torch.float8_e4m3fn
WIDE = torch.bfloat16
LEAST_SCALE = 1e-4 / 448 * (1 + 1e-6)  # engines raise block maxima to at least 1e-4
CHUNK_ROWS = 1024  # rows decoded at a time, in float32


def in_blocks(box: Box) -> Box:
    """Return the box (index range) of scales for a box of values [.., rows, columns].

    Raise ValueError if the box cuts a block.
    """
    sides = box[-2:]
    if any(start % FP8_BLOCK or stop % FP8_BLOCK for start, stop in sides):
        raise ValueError(
            f"box {list(box)} of an FP8 weight is not whole blocks of {FP8_BLOCK} × {FP8_BLOCK}"
        )
    return *box[:-2], *((start // FP8_BLOCK, stop // FP8_BLOCK) for start, stop in sides)


def decode(value: Tensor, scale: Tensor) -> Tensor:
    """Return values [N, K] times their blocks' scales [N/128, K/128], in bfloat16."""
    # 448 · LEAST_SCALE rounds above the engines' 1e-4 in bfloat16, so lower such scales.
    scale = torch.where(scale <= LEAST_SCALE, scale * (1 - 2**-8), scale)
    out = torch.empty(value.shape, dtype=WIDE, device=value.device)
    for first in range(0, value.shape[0], CHUNK_ROWS):
        rows = slice(first, first + CHUNK_ROWS)
        blocks = slice(first // FP8_BLOCK, (first + CHUNK_ROWS) // FP8_BLOCK)
        part = value[rows].float().unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
        part *= scale[blocks, None, :, None]
        out[rows] = part.flatten(2).flatten(0, 1)
    return out


def decoded(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors, FP8 decoded to bfloat16.

    Raise OrreryError if values or scales are missing.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        plain = name.removesuffix(SCALE)
        if tensor.dtype != DTYPE and plain == name:
            yield name, tensor
        elif (other := waiting.pop(plain, None)) is None:
            waiting[plain] = tensor
        else:
            value, scale = (tensor, other) if plain == name else (other, tensor)
            yield plain, decode(value, scale)
    if waiting:
        name, tensor = next(iter(waiting.items()))
        lacks = f"{name}{SCALE}" if tensor.dtype == DTYPE else name
        raise OrreryError(f"weight wire: tensor {lacks!r} is missing")


def plain_tensors(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Return the engine's tensors: bfloat16 instead of FP8, without scales."""
    return [
        TensorInfo(each.name, each.shape, "bfloat16") if _is_fp8(each) else each
        for each in tensors
        if not each.name.endswith(SCALE)
    ]


def with_scales(
    needs: Mapping[str, tuple[Box, ...]], tensors: Iterable[TensorInfo]
) -> dict[str, tuple[Box, ...]]:
    """Return `needs` with the boxes of scales, in the order of `tensors`."""
    found: dict[str, tuple[Box, ...]] = {}
    for each in tensors:
        plain = each.name.removesuffix(SCALE)
        boxes = needs.get(plain, ())
        if boxes:
            found[each.name] = boxes if plain == each.name else tuple(map(in_blocks, boxes))
    return found


class SliceDecoder:
    """Decode FP8 slices of buckets. Scales must arrive before or with their values."""

    def __init__(self, tensors: Mapping[str, TensorInfo], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._scales: dict[str, Tensor] = {}
        self._wide = torch.empty(0, dtype=torch.uint8, device=device)

    def divide(self, slices: Iterable[Slice]) -> tuple[list[Slice], list[Slice], list[Slice]]:
        scales: list[Slice] = []
        values: list[Slice] = []
        others: list[Slice] = []
        for each in slices:
            into = others
            if each.name.endswith(SCALE):
                into = scales
            elif _is_fp8(self._tensors[each.name]):
                into = values
            into.append(each)
        return scales, values, others

    @staticmethod
    def widened(values: Iterable[Slice]) -> list[Slice]:
        found, offset = [], 0
        for each in values:
            found.append(each._replace(offset=offset))
            offset += aligned_bytes(each.box, WIDE.itemsize)
        return found

    def decode(self, scales: list[Slice], values: list[Slice], bucket: Tensor) -> Tensor:
        """Copy `scales` from `bucket` (u8), decode `values`, and return a buffer of results.

        `widened(values)` gives the offsets of results. The next call overwrites the buffer.
        """
        for name, box, offset in scales:
            if name not in self._scales:
                shape = self._tensors[name].shape
                self._scales[name] = torch.empty(shape, dtype=torch.float32, device=self._device)
            part = in_bucket(bucket, offset, shape_of(box), torch.float32)
            self._scales[name][_slices(box)] = part
        places = self.widened(values)
        if places:
            size = places[-1].offset + aligned_bytes(places[-1].box, WIDE.itemsize)
            if self._wide.numel() < size:
                self._wide = torch.empty(size, dtype=torch.uint8, device=self._device)
        for (name, box, offset), place in zip(values, places, strict=True):
            value = in_bucket(bucket, offset, shape_of(box), DTYPE)
            into = in_bucket(self._wide, place.offset, shape_of(box), WIDE)
            into.copy_(_decode_part(value, self._scales[name + SCALE], starts_of(box)))
        return self._wide

    def clear(self) -> None:
        self._wide = self._wide[:0].clone()


def _decode_part(value: Tensor, scale: Tensor, starts: tuple[int, ...]) -> Tensor:
    first_row, first_column = starts
    rows, columns = value.shape
    above, left = first_row % FP8_BLOCK, first_column % FP8_BLOCK
    below, right = -(above + rows) % FP8_BLOCK, -(left + columns) % FP8_BLOCK
    here = tuple(
        slice(first // FP8_BLOCK, -(-(first + size) // FP8_BLOCK))
        for first, size in ((first_row, rows), (first_column, columns))
    )
    if not (above or left or below or right):
        return decode(value, scale[here])
    padded = value.new_zeros(above + rows + below, left + columns + right)
    padded[above : above + rows, left : left + columns] = value
    return decode(padded, scale[here])[above : above + rows, left : left + columns]


def _is_fp8(tensor: TensorInfo) -> bool:
    return tensor.dtype == "float8_e4m3fn"


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)
