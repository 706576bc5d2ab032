"""Hold training data as columns: numpy arrays over all tokens or samples.

- A sample is a rollout or an SFT example. Sample i has tokens `offsets[i]:offsets[i + 1]`.
- Token columns are `[num_tokens, ...]`, sample columns `[num_samples, ...]`. Columns not
  listed below may have any dtype.
- `logprob[t]` is log p(token t | earlier tokens). The loss includes token t if `trained[t]`.
- Defaults of absent columns: `rl_weight` 1, `cross_entropy_weight` 0, `reference_kl_weight` 0.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import make_folder, publish_file
from orrery.runtime.run_directory import rollouts_dir

TOKEN_COLUMNS = {
    "token_id": np.dtype("int32"),
    "trained": np.dtype("bool"),
    "logprob": np.dtype("float32"),  # from the engine, at the sampling temperature
    "version": np.dtype("int32"),  # policy version that sampled the token, or −1
    "advantage": np.dtype("float32"),
    "rl_weight": np.dtype("float32"),
    "cross_entropy_weight": np.dtype("float32"),
    "reference_kl_weight": np.dtype("float32"),
    "reference_logprob": np.dtype("float32"),
}
SAMPLE_COLUMNS = {
    "temperature": np.dtype("float32"),
    "dispatch_version": np.dtype("int32"),  # policy version at the start of the group
    "engine": np.dtype("int32"),  # index of the sampling engine, or −1 if unknown or several
    "reward": np.dtype("float32"),
    "group_id": np.dtype("int64"),
    "task_index": np.dtype("int32"),  # position in manifest.tasks.train
}


@dataclass(frozen=True)
class Columns:
    """Columns of samples. The arrays must not change."""

    offsets: np.ndarray  # int64 [num_samples + 1], offsets[0] == 0
    token: dict[str, np.ndarray] = field(default_factory=dict)
    sample: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        offsets = self.offsets
        is_list = offsets.ndim == 1 and len(offsets) >= 1
        if not is_list or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets must ascend from 0, got {offsets[:8]}…")
        for kind, columns, length, dtypes in (
            ("token", self.token, self.num_tokens, TOKEN_COLUMNS),
            ("sample", self.sample, self.num_samples, SAMPLE_COLUMNS),
        ):
            for name, column in columns.items():
                if len(column) != length:
                    raise ValueError(
                        f"{kind} column {name!r} has {len(column)} rows, expected {length}"
                    )
                if name in dtypes and column.dtype != dtypes[name]:
                    raise ValueError(
                        f"{kind} column {name!r} is {column.dtype}, expected {dtypes[name]}"
                    )

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def select(self, samples: Sequence[int] | np.ndarray) -> "Columns":
        samples = np.asarray(samples, dtype=np.int64)
        lengths = self.lengths[samples]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        shift = np.repeat(self.offsets[samples] - offsets[:-1], lengths)
        rows = np.arange(offsets[-1], dtype=np.int64) + shift
        return Columns(
            offsets,
            {name: column[rows] for name, column in self.token.items()},
            {name: column[samples] for name, column in self.sample.items()},
        )

    @classmethod
    def concatenate(cls, parts: Iterable["Columns"]) -> "Columns":
        parts = list(parts)
        if not parts:
            return cls(np.zeros(1, dtype=np.int64))
        token, sample = parts[0].token, parts[0].sample
        for part in parts[1:]:
            odd = (part.token.keys() ^ token.keys()) | (part.sample.keys() ^ sample.keys())
            if odd:
                raise ValueError(f"columns {sorted(odd)} are missing in some parts")
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            {name: np.concatenate([part.token[name] for part in parts]) for name in token},
            {name: np.concatenate([part.sample[name] for part in parts]) for name in sample},
        )


MicroBatch = Columns | Sequence[Columns]  # a sequence holds parts to concatenate

COALESCE_BYTES = 64 * 1024
_KINDS = ("b1", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8")
DTYPES = {dtype.str: dtype for dtype in map(np.dtype, _KINDS)}


class Slot(msgspec.Struct, frozen=True):
    """A column at byte `start` of a buffer. `kind` is "offsets", "token" or "sample"."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class ColumnLayout(msgspec.Struct, frozen=True):
    """Byte ranges (slots) of columns in a buffer, without gaps, larger dtypes first to align."""

    slots: tuple[Slot, ...]
    num_bytes: int

    def check(self) -> None:
        """Raise ValueError for unknown columns, gaps or missing offsets."""
        start = 0
        for slot in self.slots:
            is_known = slot.dtype in DTYPES and slot.kind in ("offsets", "token", "sample")
            if not is_known or any(size < 0 for size in slot.shape):
                raise ValueError(f"slot {slot} is not a column")
            if slot.start != start:
                raise ValueError(
                    f"slot {slot.name!r} starts at byte {slot.start}, "
                    f"but the slot before it ends at {start}"
                )
            start += slot.num_bytes
        if start != self.num_bytes:
            raise ValueError(f"the slots cover {start} of {self.num_bytes} bytes")
        if not any(slot.kind == "offsets" for slot in self.slots):
            raise ValueError("the slot of offsets is missing")


def parts_of(micro_batch: MicroBatch) -> Sequence[Columns]:
    return (micro_batch,) if isinstance(micro_batch, Columns) else micro_batch


def layout_of(micro_batch: MicroBatch) -> ColumnLayout:
    """Return the layout of the concatenated parts.

    Raise ValueError if their columns differ or have an unsupported dtype.
    """
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
                    f"{kind} column {name!r} has the unsupported dtype {array.dtype}. "
                    f"View it as one of {sorted(DTYPES)}"
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
            f"{kind} columns {sorted(other.keys() ^ one.keys())} are missing in some parts"
        )
    for name, array in other.items():
        if array.dtype != one[name].dtype or array.shape[1:] != one[name].shape[1:]:
            raise ValueError(f"{kind} column {name!r} differs in dtype or shape between parts")


def segments(micro_batch: MicroBatch, layout: ColumnLayout) -> Iterator[memoryview]:
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
    """Return columns that view `buffer` (u8). Raise ValueError if the layout does not fit."""
    layout.check()
    if layout.num_bytes != len(buffer):
        raise ValueError(f"the layout needs {layout.num_bytes} bytes, the buffer has {len(buffer)}")
    found: dict[str, dict[str, np.ndarray]] = {"offsets": {}, "token": {}, "sample": {}}
    for slot in layout.slots:
        data = buffer[slot.start : slot.start + slot.num_bytes]
        found[slot.kind][slot.name] = data.view(DTYPES[slot.dtype]).reshape(slot.shape)
    [offsets] = found["offsets"].values()
    return Columns(offsets, found["token"], found["sample"])


_SAFETENSORS = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<u2": "U16", "<i2": "I16", "<f2": "F16",
    "<u4": "U32", "<i4": "I32", "<f4": "F32", "<u8": "U64", "<i8": "I64", "<f8": "F64",
}  # fmt: skip
_NUMPY = {name: dtype for dtype, name in _SAFETENSORS.items()}
_MAX_HEADER_BYTES = 100_000_000  # safetensors' limit


def write(
    path: Path, micro_batch: MicroBatch, info: dict[str, Any] | None = None, sync: bool = True
) -> int:
    """Write a safetensors file atomically. Return its size in bytes.

    Without `sync`, a crash may lose the file.
    """
    layout = layout_of(micro_batch)
    header: dict[str, Any] = {"__metadata__": {"orrery": json.dumps(info or {}, sort_keys=True)}}
    for slot in layout.slots:
        name = "offsets" if slot.kind == "offsets" else f"{slot.kind}/{slot.name}"
        header[name] = {
            "dtype": _SAFETENSORS[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [slot.start, slot.start + slot.num_bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb", buffering=1 << 20) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for segment in segments(micro_batch, layout):
            file.write(segment)
    if sync:
        publish_file(aside, path)
    else:
        aside.rename(path)
    return 8 + len(text) + layout.num_bytes


def split_header(file: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Split a safetensors file (u8) into JSON header and data. Raise ValueError if damaged.

    Used because the safetensors library cannot read bfloat16 into numpy.
    """
    header_bytes = int.from_bytes(file[:8].tobytes(), "little")
    if header_bytes > min(_MAX_HEADER_BYTES, len(file) - 8):
        raise ValueError(f"its header of {header_bytes} bytes exceeds the {len(file)} of the file")
    header = json.loads(file[8 : 8 + header_bytes].tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, file[8 + header_bytes :]


def read(path: Path) -> tuple[Columns, dict[str, Any]]:
    """Return memory-mapped columns and metadata. Raise OrreryError for a bad file.

    The columns become invalid if another machine removes the file over NFS.
    """
    try:
        file = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        file.flags.writeable = False
        header, body = split_header(file)
        info = json.loads(header.pop("__metadata__", {}).get("orrery", "{}"))
        slots = []
        for full_name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            kind, _, name = full_name.partition("/")
            dtype, shape = _NUMPY[tensor["dtype"]], tuple(tensor["shape"])
            slots.append(Slot(kind, name or full_name, dtype, shape, tensor["data_offsets"][0]))
        return columns_from(ColumnLayout(tuple(slots), len(body)), body), info
    except FileNotFoundError as error:
        raise OrreryError(f"{path}: no such file") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OrreryError(f"{path}: not a safetensors file of columns ({error})") from error


def batch_path(run_dir: Path, step: int) -> Path:
    return rollouts_dir(run_dir) / f"step_{step}.safetensors"


def write_batch(run_dir: Path, step: int, batch: MicroBatch, **info: Any) -> Path:
    path = batch_path(run_dir, step)
    make_folder(path.parent)
    write(path, batch, {"step": step, **info})
    return path


def read_batch(run_dir: Path, step: int) -> tuple[Columns, dict[str, Any]]:
    return read(batch_path(run_dir, step))


def prune_batches(run_dir: Path, step: int, keep: int) -> None:
    for old in batch_steps(run_dir):
        if old <= step - keep:
            batch_path(run_dir, old).unlink(missing_ok=True)


def batch_steps(run_dir: Path) -> list[int]:
    paths = rollouts_dir(run_dir).glob("step_*.safetensors")
    names = [path.stem.removeprefix("step_") for path in paths]
    return sorted(int(name) for name in names if name.isdigit())
