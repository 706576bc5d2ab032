"""Columns in safetensors files: gathered straight from the parts when written, mapped without a copy when read.

- In: a micro-batch as parts, and a small dict of JSON values that goes into the file's metadata.
- Out: a valid safetensors file (tensors `offsets`, `token/<name>`, `sample/<name>`), which any safetensors reader opens.
- Always: written aside, synced unless it need not outlive the machine, renamed. The library's own writer copies every tensor once
  more, which matters at gigabytes.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import publish_file
from orrery.transport.column_bytes import (
    Layout,
    MicroBatch,
    Slot,
    columns_from,
    layout_of,
    segments,
)
from orrery.transport.columns import Columns

_SAFETENSORS = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<u2": "U16", "<i2": "I16", "<f2": "F16",
    "<u4": "U32", "<i4": "I32", "<f4": "F32", "<u8": "U64", "<i8": "I64", "<f8": "F64",
}  # fmt: skip
_NUMPY = {name: dtype for dtype, name in _SAFETENSORS.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def write(
    path: Path, micro_batch: MicroBatch, info: dict[str, Any] | None = None, sync: bool = True
) -> int:
    """Write `path` at once or not at all; returns its bytes. `sync=False` where the file need not outlive the machine."""
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


def read(path: Path, mapped: bool = True) -> tuple[Columns, dict[str, Any]]:
    """(columns, info). The columns are read-only views of the mapped file.

    They stay valid when this machine removes it, and not where another does on a network file system: `mapped=False` reads it whole.
    """
    try:
        file = (
            np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
            if mapped
            else np.fromfile(path, dtype=np.uint8)
        )
        file.flags.writeable = False
        header_bytes = int.from_bytes(file[:8].tobytes(), "little")
        if header_bytes > min(_MAX_HEADER_BYTES, len(file) - 8):
            raise ValueError(f"a header of {header_bytes} bytes in a file of {len(file)}")
        header = json.loads(file[8 : 8 + header_bytes].tobytes())
        info = json.loads(header.pop("__metadata__", {}).get("orrery", "{}"))
        slots = []
        for full_name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            kind, _, name = full_name.partition("/")
            slots.append(
                Slot(
                    kind,
                    name or full_name,
                    _NUMPY[tensor["dtype"]],
                    tuple(tensor["shape"]),
                    tensor["data_offsets"][0],
                )
            )
        body = file[8 + header_bytes :]
        return columns_from(Layout(tuple(slots), len(body)), body), info
    except FileNotFoundError as error:
        raise OrreryError(f"{path}: no such file") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OrreryError(f"{path}: not a safetensors file of columns ({error})") from error
