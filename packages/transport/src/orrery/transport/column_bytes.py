"""Columns as one run of bytes: the layout that every wire and store shares.

- In: a micro-batch as parts (`Columns` of one or more samples each) that were never concatenated.
- Out: the bytes of the concatenation, as segments that are views of the parts (scatter/gather); at the other end one
  buffer becomes `Columns` again without a copy.
- Always: one slot a column, wider dtypes first, no gaps: every slot is aligned to its own dtype and the run is a valid
  safetensors body.
- Never: object dtypes, pickles. Whoever decodes checks that every slot lies inside the buffer.
"""

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from orrery.transport.columns import Columns

MicroBatch = Columns | Sequence[Columns]

COALESCE_BYTES = 64 * 1024  # below this, copying a segment is cheaper than a frame of its own
DTYPES = {
    dtype.str: dtype
    for dtype in map(
        np.dtype, ("b1", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8")
    )
}


class Slot(msgspec.Struct, frozen=True):
    """Where one column lies: `start` bytes into the run. `kind` is offsets, token or sample."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class Layout(msgspec.Struct, frozen=True):
    """The slots of one micro-batch, in the order of their bytes."""

    slots: tuple[Slot, ...]
    num_bytes: int

    def check(self) -> None:
        """Raises ValueError where this is not what `layout_of` makes, so that a damaged header never reads past its buffer."""
        start = 0
        for slot in self.slots:
            if (
                slot.dtype not in DTYPES
                or slot.kind not in ("offsets", "token", "sample")
                or any(size < 0 for size in slot.shape)
            ):
                raise ValueError(f"slot {slot} is not a column")
            if slot.start != start:
                raise ValueError(
                    f"slot {slot.name!r} starts at byte {slot.start}, not at {start} where the one before ends"
                )
            start += slot.num_bytes
        if start != self.num_bytes or not any(slot.kind == "offsets" for slot in self.slots):
            raise ValueError(f"the slots name {start} bytes of {self.num_bytes}, or no offsets")


def parts_of(micro_batch: MicroBatch) -> Sequence[Columns]:
    return (micro_batch,) if isinstance(micro_batch, Columns) else micro_batch


def layout_of(micro_batch: MicroBatch) -> Layout:
    """The layout of the concatenation of the parts. Raises ValueError where the parts do not have the same columns."""
    parts = parts_of(micro_batch)
    num_samples = sum(part.num_samples for part in parts)
    num_tokens = sum(part.num_tokens for part in parts)
    columns: list[tuple[str, str, str, tuple[int, ...]]] = [
        ("offsets", "offsets", "<i8", (num_samples + 1,))
    ]
    if parts:
        first = parts[0]
        for kind, length in (("token", num_tokens), ("sample", num_samples)):
            arrays: dict[str, np.ndarray] = getattr(first, kind)
            for part in parts[1:]:
                others: dict[str, np.ndarray] = getattr(part, kind)
                if others.keys() != arrays.keys():
                    raise ValueError(
                        f"{kind} columns {sorted(others.keys() ^ arrays.keys())} are in some parts only"
                    )
                for name, array in others.items():
                    if (
                        array.dtype != arrays[name].dtype
                        or array.shape[1:] != arrays[name].shape[1:]
                    ):
                        raise ValueError(
                            f"{kind} column {name!r} differs in dtype or shape between parts"
                        )
            for name, array in arrays.items():
                if array.dtype.str not in DTYPES:
                    raise ValueError(
                        f"{kind} column {name!r} has dtype {array.dtype}, which no wire carries; view it as one of {sorted(DTYPES)}"
                    )
                columns.append((kind, name, array.dtype.str, (length, *array.shape[1:])))
    columns[1:] = sorted(
        columns[1:], key=lambda column: (-DTYPES[column[2]].itemsize, column[0], column[1])
    )
    slots, start = [], 0
    for kind, name, dtype, shape in columns:
        slot = Slot(kind, name, dtype, shape, start)
        slots.append(slot)
        start += slot.num_bytes
    return Layout(tuple(slots), start)


def segments(micro_batch: MicroBatch, layout: Layout) -> Iterator[memoryview]:
    """The bytes of the run, in order, as views of the parts' own memory (copied only where a part is not contiguous)."""
    parts = parts_of(micro_batch)
    for slot in layout.slots:
        if slot.kind == "offsets":
            lengths = [part.lengths for part in parts]
            yield _bytes_of(
                np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
                if lengths
                else np.zeros(1, np.int64)
            )
        else:
            for part in parts:
                array = getattr(part, slot.kind)[slot.name]
                if array.size:
                    yield _bytes_of(array)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def chunks(run: Iterator[memoryview], chunk_bytes: int) -> Iterator[memoryview]:
    """The same bytes in chunks of at most `chunk_bytes`: large segments by reference, small ones gathered into one chunk."""
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


def columns_from(layout: Layout, buffer: np.ndarray) -> Columns:
    """The columns that lie in `buffer` (uint8 [num_bytes]), as views of it. Raises ValueError where the layout is damaged."""
    layout.check()
    if layout.num_bytes != len(buffer):
        raise ValueError(f"the layout names {layout.num_bytes} bytes of {len(buffer)}")
    found: dict[str, dict[str, np.ndarray]] = {"offsets": {}, "token": {}, "sample": {}}
    for slot in layout.slots:
        array = (
            buffer[slot.start : slot.start + slot.num_bytes]
            .view(DTYPES[slot.dtype])
            .reshape(slot.shape)
        )
        found[slot.kind][slot.name] = array
    [offsets] = found["offsets"].values()
    return Columns(offsets, found["token"], found["sample"])
