"""Columns in safetensors files, and the trained batches that a run keeps.

- A file holds tensors `offsets`, `token/<name>` and `sample/<name>`, and JSON metadata.
- Parts of a micro-batch are written directly. The library's writer would copy every tensor.
- `rollouts/step_<n>.safetensors` holds the batch of step n.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import make_folder, publish_file
from orrery.runtime.run_directory import rollouts_dir
from orrery.wire.columns import (
    ColumnLayout,
    Columns,
    MicroBatch,
    Slot,
    columns_from,
    layout_of,
    segments,
)

_SAFETENSORS = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<u2": "U16", "<i2": "I16", "<f2": "F16",
    "<u4": "U32", "<i4": "I32", "<f4": "F32", "<u8": "U64", "<i8": "I64", "<f8": "F64",
}  # fmt: skip
_NUMPY = {name: dtype for dtype, name in _SAFETENSORS.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's limit


def write(
    path: Path, micro_batch: MicroBatch, info: dict[str, Any] | None = None, sync: bool = True
) -> int:
    """Write `path` atomically. Return its size in bytes. Without `sync` a crash may lose it."""
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
    """Split a safetensors file (u8) into its JSON header and its data.

    Raises ValueError if the header is incomplete. The safetensors library has no numpy type for
    bfloat16 and does not name a cut-off tensor.
    """
    header_bytes = int.from_bytes(file[:8].tobytes(), "little")
    if header_bytes > min(_MAX_HEADER_BYTES, len(file) - 8):
        raise ValueError(f"a header of {header_bytes} bytes exceeds a file of {len(file)}")
    header = json.loads(file[8 : 8 + header_bytes].tobytes())
    if not isinstance(header, dict):
        raise ValueError("a header that is not a table")
    return header, file[8 + header_bytes :]


def read(path: Path) -> tuple[Columns, dict[str, Any]]:
    """Return (columns, info), mapped and read-only. Raises OrreryError if missing or damaged.

    Columns stay valid if this machine removes the file, but not if another does over NFS.
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
