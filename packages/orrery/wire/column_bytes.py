"""The byte layout of columns, shared by all wires and files.

- The sender has a micro-batch as a list of parts (`Columns`), and never concatenates them. It sends
  segments, which are views of the parts.
- The receiver turns one buffer into `Columns` without a copy.
- Columns follow each other without gaps, wider dtypes first. So each is aligned to its dtype, and
  the bytes are a valid safetensors body.
- The receiver checks that all columns lie inside the buffer.
"""

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from orrery.wire.columns import Columns

MicroBatch = Columns | Sequence[Columns]

COALESCE_BYTES = 64 * 1024  # segments below this size are copied into one chunk
_KINDS = ("b1", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8")
DTYPES = {dtype.str: dtype for dtype in map(np.dtype, _KINDS)}


class Slot(msgspec.Struct, frozen=True):
    """A column's place, from byte `start` of the layout. `kind` is offsets, token or sample."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class ColumnLayout(msgspec.Struct, frozen=True):
    slots: tuple[Slot, ...]
    num_bytes: int

    def check(self) -> None:
        """Raise ValueError if `layout_of` cannot have made this layout: it is unsafe."""
        start = 0
        for slot in self.slots:
            is_known = slot.dtype in DTYPES and slot.kind in ("offsets", "token", "sample")
            if not is_known or any(size < 0 for size in slot.shape):
                raise ValueError(f"slot {slot} is not a column")
            if slot.start != start:
                raise ValueError(
                    f"slot {slot.name!r} starts at byte {slot.start}, "
                    f"not at {start}, the end of the slot before it"
                )
            start += slot.num_bytes
        if start != self.num_bytes or not any(slot.kind == "offsets" for slot in self.slots):
            raise ValueError(f"the slots cover {start} of {self.num_bytes} bytes, or lack offsets")


def parts_of(micro_batch: MicroBatch) -> Sequence[Columns]:
    return (micro_batch,) if isinstance(micro_batch, Columns) else micro_batch


def layout_of(micro_batch: MicroBatch) -> ColumnLayout:
    """Return the layout of the parts' concatenation. Raises ValueError if their columns differ."""
    parts = parts_of(micro_batch)
    num_samples = sum(part.num_samples for part in parts)
    num_tokens = sum(part.num_tokens for part in parts)
    columns: list[tuple[str, str, str, tuple[int, ...]]] = []
    for kind, length in (("token", num_tokens), ("sample", num_samples)) if parts else ():
        arrays: dict[str, np.ndarray] = getattr(parts[0], kind)
        for part in parts[1:]:
            _check_alike(kind, arrays, getattr(part, kind))
        for name, array in arrays.items():
            if array.dtype.str not in DTYPES:
                raise ValueError(
                    f"{kind} column {name!r} has dtype {array.dtype}, which no wire carries; "
                    f"view it as one of {sorted(DTYPES)}"
                )
            columns.append((kind, name, array.dtype.str, (length, *array.shape[1:])))
    columns.sort(key=lambda column: (-DTYPES[column[2]].itemsize, column[0], column[1]))
    slots, start = [], 0
    for kind, name, dtype, shape in [("offsets", "offsets", "<i8", (num_samples + 1,)), *columns]:
        slot = Slot(kind, name, dtype, shape, start)
        slots.append(slot)
        start += slot.num_bytes
    return ColumnLayout(tuple(slots), start)


def _check_alike(kind: str, one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    if other.keys() != one.keys():
        raise ValueError(
            f"{kind} columns {sorted(other.keys() ^ one.keys())} are in some parts only"
        )
    for name, array in other.items():
        if array.dtype != one[name].dtype or array.shape[1:] != one[name].shape[1:]:
            raise ValueError(f"{kind} column {name!r} differs in dtype or shape between parts")


def segments(micro_batch: MicroBatch, layout: ColumnLayout) -> Iterator[memoryview]:
    """Yield the bytes in order as views of the parts. Only non-contiguous arrays are copied."""
    parts = parts_of(micro_batch)
    for slot in layout.slots:
        if slot.kind == "offsets":
            lengths = np.concatenate([np.zeros(1, np.int64), *(part.lengths for part in parts)])
            yield _bytes_of(np.cumsum(lengths))
        else:
            for part in parts:
                array = getattr(part, slot.kind)[slot.name]
                if array.size:
                    yield _bytes_of(array)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def chunks(run: Iterator[memoryview], chunk_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes in chunks of at most `chunk_bytes`. Join small segments."""
    gathered = bytearray()
    for segment in run:
        if len(segment) < COALESCE_BYTES:
            gathered += segment
            if len(gathered) >= COALESCE_BYTES:
                yield memoryview(gathered)
                gathered = bytearray()
            continue
        if gathered:
            yield memoryview(gathered)
            gathered = bytearray()
        for start in range(0, len(segment), chunk_bytes):
            yield segment[start : start + chunk_bytes]
    if gathered:
        yield memoryview(gathered)


def columns_from(layout: ColumnLayout, buffer: np.ndarray) -> Columns:
    """Return views of `buffer` (uint8 [num_bytes]). Raises ValueError if the layout is damaged."""
    layout.check()
    if layout.num_bytes != len(buffer):
        raise ValueError(f"the layout needs {layout.num_bytes} bytes, the buffer has {len(buffer)}")
    found: dict[str, dict[str, np.ndarray]] = {"offsets": {}, "token": {}, "sample": {}}
    for slot in layout.slots:
        data = buffer[slot.start : slot.start + slot.num_bytes]
        found[slot.kind][slot.name] = data.view(DTYPES[slot.dtype]).reshape(slot.shape)
    [offsets] = found["offsets"].values()
    return Columns(offsets, found["token"], found["sample"])
