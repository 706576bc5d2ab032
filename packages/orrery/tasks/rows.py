"""Read rows of JSONL, JSON, CSV, Parquet and Arrow files.

- Folders come from `Dataset.save_to_disk` or `orrery fetch`. Fetched files' names begin with the
  split (`main/train-00000-of-00001.parquet`).
- JSONL and Arrow files are memory-mapped. Other files are read whole.
"""

import csv
import hashlib
import json
import mmap
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import MAX_DEPTH
from orrery.manifest.publish import DATA_SUFFIXES, data_files
from orrery.manifest.shards import split_of

TOO_DEEP = f"values are nested deeper than {MAX_DEPTH}"


class DataRows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`.

        Raise ValueError if the row is no object, is too deep, or has a lone surrogate.
        """

    def place(self, index: int) -> str:
        """Return a row's place, such as `problems.jsonl:7`."""


def open_rows(path: Path, split: str | None = None) -> DataRows:
    if path.is_dir():
        return _open_folder(path, split)
    if split is not None:
        raise OrreryError(f"split: {path} is one file without splits. Set split to null")
    return _open_file(path)


def _open_file(path: Path) -> DataRows:
    if path.suffix not in DATA_SUFFIXES:
        raise OrreryError(f"path: {path} does not end in one of {', '.join(DATA_SUFFIXES)}")
    _opened(path).close()
    try:
        match path.suffix:
            case ".jsonl":
                return JsonLines(path)
            case ".json" | ".csv":
                return Listed(path)
            case _:
                return Tables(path, [path])
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors
        raise OrreryError(f"path: {path} cannot be read: {error}. Write the file again") from error


def _open_folder(path: Path, split: str | None) -> DataRows:
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        folder = saved_split(path, split)
        return Tables(folder, saved_files(folder, saved_state(folder)))
    by_split = splits(path)
    files = sorted(by_split[_chosen(path, split, by_split)])
    if all(file.suffix in (".parquet", ".arrow") for file in files):
        return Tables(path, files)
    return Joined([_open_file(file) for file in files])


def splits(path: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in data_files(path):
        found.setdefault(split_of(file.name), []).append(file)
    if not found:
        raise OrreryError(f"path: {path} holds no file that ends in {', '.join(DATA_SUFFIXES)}")
    return found


def _chosen(path: Path, split: str | None, splits: Iterable[str]) -> str:
    if split is not None and split in splits:
        return split
    what = f"has no {split!r}" if split is not None else "is a folder of splits"
    raise OrreryError(f"split: {path} {what}. Choose from {', '.join(sorted(splits))}")


def saved_split(path: Path, split: str | None) -> Path:
    if (path / "dataset_dict.json").is_file():
        return path / _chosen(path, split, _json(path / "dataset_dict.json")["splits"])
    if split is not None:
        raise OrreryError(
            f"split: {path} is not a dataset of several splits, so there is no {split!r}. "
            "Set it to null"
        )
    return path


def saved_state(folder: Path) -> dict[str, Any]:
    return {"_data_files": [], "_fingerprint": None} | _json(folder / "state.json")


def saved_files(folder: Path, state: dict[str, Any]) -> list[Path]:
    return [folder / file["filename"] for file in state["_data_files"]]


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise OrreryError(
            f"path: {error}. Name a folder that `Dataset.save_to_disk` wrote"
        ) from error


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise OrreryError(f"path: {path}: {error.strerror}. Name a file or a folder") from error


class JsonLines:
    def __init__(self, path: Path):
        self._path, self._begins, self._numbers, at = path, array("q"), array("q"), 0
        digest = hashlib.sha256()
        with path.open("rb") as file:
            # Read bytes, because text mode would split lines at \r too.
            for number, line in enumerate(file, 1):
                digest.update(line)
                if not line.isspace():
                    self._begins.append(at)
                    self._numbers.append(number)
                at += len(line)
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if at else b""
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin = self._begins[index]
        end = self._content.find(b"\n", begin)
        line = self._content[begin : end if end >= 0 else None].decode()
        try:
            return _object(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"the line is not JSON ({error.msg}, column {error.colno})") from error
        except RecursionError:
            raise ValueError(TOO_DEEP) from None

    def place(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"


class Listed:
    """Rows of a JSON list, a JSON object's only list, or a CSV file."""

    def __init__(self, path: Path):
        self._path = path
        with path.open(encoding="utf-8-sig", newline="") as file:
            self._rows = list(csv.DictReader(file)) if path.suffix == ".csv" else _listed(file)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _object(self._rows[index])

    def place(self, index: int) -> str:
        return f"{self._path}: row {index}"


class Joined:
    def __init__(self, parts: Sequence[DataRows]):
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _part(self, index: int) -> tuple[DataRows, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[number], index - (int(self._ends[number - 1]) if number else 0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, at = self._part(index)
        return part[at]

    def place(self, index: int) -> str:
        part, at = self._part(index)
        return part.place(at)


class Tables:
    """Rows of Parquet or Arrow files, without null fields.

    If `needed` is given, files must have it, and rows have only the columns `needed` and `also`.
    """

    def __init__(
        self, path: Path, files: Sequence[Path], needed: str | None = None, also: Sequence[str] = ()
    ):
        try:
            import pyarrow as pa
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise OrreryError(
                "kind: datasets are read with pyarrow, which is not installed here. Type "
                "`make setup`, or `pip install pyarrow` outside this checkout's environment"
            ) from error
        self._path, self._parts = path, []
        for file in files:
            try:
                if file.suffix == ".parquet":
                    table = parquet.read_table(file, memory_map=True)
                else:
                    table = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
            except (OSError, pa.ArrowInvalid) as error:
                raise OrreryError(f"path: cannot read {file}: {error}") from error
            if needed is not None:
                if needed not in table.column_names:
                    raise OrreryError(
                        f"column: {file} has no {needed!r}. "
                        f"Choose from {', '.join(sorted(table.column_names))}"
                    )
                kept = {needed, *also}
                table = table.select([name for name in table.column_names if name in kept])
            self._parts += table.to_batches()
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        part, at = self._parts[number], index - (int(self._ends[number - 1]) if number else 0)
        return _present({name: part.column(name)[at].as_py() for name in part.schema.names})

    def place(self, index: int) -> str:
        return f"{self._path}: row {index}"


def _listed(file: Any) -> list[Any]:
    try:
        read = json.load(file)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if isinstance(read, dict):
        lists = [value for value in read.values() if isinstance(value, list)]
        read = lists[0] if len(lists) == 1 else read
    if not isinstance(read, list):
        raise ValueError("it has no list of rows")
    return read


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object, not {type(row).__name__}")
    _check(row, MAX_DEPTH)
    return row


def _check(value: Any, max_depth: int) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("a text has a lone surrogate") from None
    elif isinstance(value, dict | list):
        if not max_depth:
            raise ValueError(TOO_DEEP)
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            _check(one, max_depth - 1)


def _present(value: Any) -> Any:
    """Remove null fields at any depth. Arrow adds them for missing fields."""
    if isinstance(value, dict):
        return {name: _present(one) for name, one in value.items() if one is not None}
    return [_present(one) for one in value] if isinstance(value, list) else value
