"""Append metrics and spans as JSON lines, and read them.

- `metrics/<role>.<i>.jsonl`: `{"time_s", "stage", "attempt", "step", **values}`
- `metrics/<role>.<i>.spans.jsonl`: `{"name", "start_s", "end_s", "stage", "attempt", "step",
  **attrs}`. Times are from `time.time()`.
- An attempt that resumes at step n replaces older attempts' rows from step n on.
"""

import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from orrery.manifest.errors import explain_os_error
from orrery.manifest.json_file import open_regular, parse_json
from orrery.runtime.run_directory import metrics_dir
from orrery.runtime.timing import period_s

Row = dict[str, Any]


class MetricsFile:
    def __init__(self, run_dir: Path, stage: str, role: str, index: int, attempt: int):
        folder = metrics_dir(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._stamp = {"stage": stage, "attempt": attempt}
        self._rows = _Lines(folder / f"{role}.{index}.jsonl")
        self._spans = _Lines(folder / f"{role}.{index}.spans.jsonl")

    def write(self, step: int | None = None, **values: Any) -> None:
        self._rows.append({"time_s": time.time(), **self._stamp, "step": step, **values})

    @contextmanager
    def span(self, name: str, step: int | None = None, **attrs: Any) -> Iterator[None]:
        start_s = time.time()
        try:
            yield
        finally:
            self.add_span(name, start_s, time.time(), step, **attrs)

    def add_span(
        self, name: str, start_s: float, end_s: float, step: int | None = None, **attrs: Any
    ) -> None:
        self._spans.append(
            {"name": name, "start_s": start_s, "end_s": end_s, **self._stamp, "step": step, **attrs}
        )

    def close(self) -> None:
        self._rows.close()
        self._spans.close()


class _Lines:
    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self._file: int | None = None
        self._is_torn = False  # the file ends with an incomplete row
        self._end: weakref.finalize | None = None

    def append(self, row: Row) -> None:
        line = json.dumps(_plain(row), separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                self._end = weakref.finalize(self, os.close, self._file)
                self._is_torn = os.fstat(self._file).st_size > 0 and not _ends_a_line(self._path)
            if self._is_torn:
                line = b"\n" + line
            while line:  # a full disk may store a part of the line
                line = line[os.write(self._file, line) :]
                self._is_torn = bool(line)

    def close(self) -> None:
        with self._lock:
            if self._end is not None:
                self._end()
            self._file = self._end = None


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def rows(path: Path | str) -> Iterator[Row]:
    try:
        file = open_regular(Path(path))
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if (row := parse_row(line)) is not None:
                yield row


STAMPS: dict[str, type | UnionType] = {
    **dict.fromkeys(("step", "attempt", "version", "engine"), int | None),
    **dict.fromkeys(("stage", "event", "name", "task", "policy"), str | None),
    **dict.fromkeys(("time_s", "start_s", "end_s"), int | float),
}


def parse_row(line: bytes) -> Row | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and all(
        isinstance(row[key], kind) for key, kind in STAMPS.items() if key in row
    )
    return row if is_row else None


def used_by_process(row: Row) -> dict[str, dict[str, float]]:
    processes = row.get("processes")
    if not isinstance(processes, dict):
        return {}
    return {
        process: {name: value for name, value in used.items() if isinstance(value, int | float)}
        for process, used in processes.items()
        if isinstance(used, dict)
    }


class Attempts:
    """Find rows that no newer attempt replaces. Call `add` for all rows before `counts`."""

    def __init__(self) -> None:
        self._first: dict[tuple, dict[int, int]] = {}

    def add(self, row: Row) -> None:
        if (step := row.get("step")) is not None:
            steps, attempt = self._first.setdefault(_series(row), {}), row.get("attempt", 0)
            if step < steps.get(attempt, math.inf):
                steps[attempt] = step

    def counts(self, row: Row) -> bool:
        step, attempt = row.get("step"), row.get("attempt", 0)
        return step is None or not any(
            newer > attempt and begin <= step for newer, begin in self._first[_series(row)].items()
        )


def merge_attempts(all_rows: Iterable[Row]) -> list[Row]:
    all_rows = [row for row in all_rows if "time_s" in row or "start_s" in row]
    attempts = Attempts()
    for row in all_rows:
        attempts.add(row)
    return sorted(
        filter(attempts.counts, all_rows),
        key=lambda row: row["time_s"] if "time_s" in row else row["start_s"],
    )


def _series(row: Row) -> tuple:
    return row.get("stage"), row.get("event"), row.get("name")


def read(path: Path | str) -> list[Row]:
    return merge_attempts(rows(path))


class MetricsTail:
    """Read rows appended to `metrics/*.jsonl` (not spans) since the last call."""

    def __init__(self, run_dir: Path, from_end: bool = False):
        self._folder = metrics_dir(run_dir)
        self._offsets: dict[Path, int] = {}
        if from_end:
            self._offsets = {path: path.stat().st_size for path in self._paths()}

    def _paths(self) -> list[Path]:
        found = sorted(self._folder.glob("*.jsonl"))
        return [path for path in found if not path.name.endswith(".spans.jsonl")]

    def new_rows(self) -> Iterator[tuple[str, Row]]:
        """Yield `(process, row)`. Raise the last OSError only after reading all files."""
        trouble: OSError | None = None
        for path in self._paths():
            try:
                lines = self._new_lines(path)
            except OSError as error:
                trouble = error
                continue
            for line in lines:
                if (row := parse_row(line)) is not None and "time_s" in row:
                    yield path.name.removesuffix(".jsonl"), row
        if trouble is not None:
            raise trouble

    def _new_lines(self, path: Path) -> list[bytes]:
        offset = self._offsets.get(path, 0)
        if path.stat().st_size == offset:
            return []
        with open_regular(path) as file:
            file.seek(offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offsets[path] = offset + whole
        return data[:whole].split(b"\n")


log = logging.getLogger(__name__)

PERIOD_S = 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Stat:
    cpu_s: float
    rss_bytes: int


def parse_stat(stat: str) -> Stat:
    """Parse /proc/<pid>/stat, whose process name may contain spaces and brackets."""
    fields = stat.rpartition(")")[2].split()
    return Stat((int(fields[11]) + int(fields[12])) / TICKS_PER_S, int(fields[21]) * PAGE_BYTES)


def process_tree(root: int, without: Collection[int] = ()) -> dict[int, Stat]:
    found: dict[int, Stat] = {}
    left = [root]
    while left:
        pid = left.pop()
        try:
            found[pid] = parse_stat(Path(f"/proc/{pid}/stat").read_text())
            for task in os.listdir(f"/proc/{pid}/task"):
                children = map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
                left.extend(child for child in children if child not in without)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


class Sampler:
    def __init__(self, pid: int, without: Collection[int] = ()):
        self._pid, self._without, self._time_s = pid, frozenset(without), time.monotonic()
        self._cpu_s = {pid: each.cpu_s for pid, each in process_tree(pid, self._without).items()}

    def sample(self) -> dict[str, float]:
        now_s, found = time.monotonic(), process_tree(self._pid, self._without)
        used_s = sum(each.cpu_s - self._cpu_s.get(pid, 0.0) for pid, each in found.items())
        percent = 100 * used_s / max(now_s - self._time_s, 1 / TICKS_PER_S)
        self._cpu_s, self._time_s = {pid: each.cpu_s for pid, each in found.items()}, now_s
        return {
            "cpu_percent": round(max(percent, 0.0), 1),
            "rss_bytes": sum(each.rss_bytes for each in found.values()),
        }


class UsageRows:
    """Write CPU use (100% per core) and memory of this process tree."""

    def __init__(self, name: str, metrics: MetricsFile, period_s: float = PERIOD_S):
        self._name, self._metrics, self._period_s = name, metrics, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        sampler, begin_s, has_failed = Sampler(os.getpid()), time.monotonic(), False
        while not self._stop.wait(period_s(time.monotonic() - begin_s, self._period_s)):
            try:
                self._metrics.write(event="usage", processes={self._name: sampler.sample()})
            except OSError as error:
                if not has_failed:
                    log.warning(
                        "CPU and memory use cannot be written (%s); trying again",
                        explain_os_error(error),
                    )
                has_failed = True
