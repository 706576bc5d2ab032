"""TensorBoard: every number of every metric row as a scalar under `metrics/tensorboard/<stage>/<process>`.

- In: rows as `tail` yields them. Out: event files, written without torch or TensorFlow.
- A scalar's step is the row's `step`, else its `version`, else (usage and the like) whole seconds since the first row.
- Names: `<event>/<value>`, dicts one level deeper (`dropped/stale`), rows without an event under the process's role. What a row is about
  stands between: `evaluation/<task>/reward_mean` (of two policies `evaluation/<task>/<policy>/…`), `engine/<index>/kv_usage`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from orrery.observe.metrics import Row

STAMPS = ("time_s", "stage", "attempt", "step", "event", "version")
SUBJECTS = (
    "task",
    "policy",
    "engine",
    "process",
)  # what a row is about: a name or an index, never a measurement


def scalars(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """The numbers of a row, named; texts, lists and nulls are left out."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}/{name}")
        elif isinstance(value, int | float):
            yield f"{prefix}/{name}", float(value)


def named(process: str, row: Row) -> tuple[int | None, dict[str, float]]:
    """Step and scalars of one row, as every sink shows them."""
    step = row.get("step")
    step = row.get("version") if step is None else step
    subjects = [str(row[key]) for key in SUBJECTS if row.get(key) is not None]
    prefix = "/".join([row.get("event") or process.split(".")[0], *subjects])
    return step, dict(
        scalars(
            {key: value for key, value in row.items() if key not in (*STAMPS, *SUBJECTS)}, prefix
        )
    )


class TensorBoardSink:
    """One event file a process and stage."""

    def __init__(self, run_dir: Path):
        self._folder = run_dir / "metrics" / "tensorboard"
        self._writers: dict[tuple[str, str], EventFileWriter] = {}
        self._first_s: float | None = None

    def write(self, process: str, row: Row) -> None:
        step, values = named(process, row)
        self._first_s = self._first_s or row["time_s"]
        if not values:
            return
        key = (str(row.get("stage")), process)
        if key not in self._writers:
            self._writers[key] = EventFileWriter(str(self._folder / key[0] / key[1]), flush_secs=10)
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        step = int(row["time_s"] - self._first_s) if step is None else int(step)
        self._writers[key].add_event(Event(wall_time=row["time_s"], step=step, summary=summary))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
