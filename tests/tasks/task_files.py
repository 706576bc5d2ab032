"""Shared by the tests of the task `dataset`: files of every form, and args that read them."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from orrery.manifest.publish import sha256_of_data as digest
from orrery.manifest.schema import TaskUse
from orrery.tasks import make

ROWS = [{"question": f"{a} + {b}?", "answer": str(a + b)} for a in range(8) for b in range(5)]


def write(path: Path, rows=ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
        case ".json":
            path.write_text(json.dumps({"name": "sums", "rows": rows}))
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
        case ".arrow":
            table = pa.Table.from_pylist(rows)
            with pa.ipc.new_stream(path, table.schema) as file:
                file.write_table(table, max_chunksize=7)
    return path


def source(path: Path, split=None) -> dict:
    return {"kind": "source", "path": str(path), "sha256": digest(path), "split": split}


def args(path: Path, **changes) -> dict:
    plain = {
        "source": source(path),
        "held_out": {"kind": "fraction", "fraction": 0.25},
        "split": "train",
        "where": {},
        "system": None,
        "prompt": "{question}",
        "answer": "{answer}",
        "answer_pattern": None,
        "verdict": {"kind": "exact", "ignore_case": True, "pattern": None},
    }
    return plain | changes


def task(seed=1, **given):
    use = TaskUse(name="sums", kind="dataset", args=given, weight=1.0, seed=seed, max_turns=1)
    return make(use)


def few_shot(num_examples=2, **given):
    inner = {"kind": "dataset", "args": given}
    return {**inner, "num_examples": num_examples, "system": None}
