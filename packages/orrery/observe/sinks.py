"""Metric rows as scalars in TensorBoard, and in Weights & Biases if the site sets WANDB_PROJECT.

- In: rows from `MetricsTail`. TensorBoard files: `metrics/tensorboard/<stage>/<process>`.
- Names: `<event>/<value>`, of nested dicts `dropped/stale`. Rows without an event are named by
  role. A row's subjects follow the event: `evaluation/<task>/reward_mean` (with two policies
  `evaluation/<task>/<policy>/…`), `engine/<index>/kv_usage`.
- TensorBoard's step is the row's `step`, else its `version`, else seconds since the first row.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orrery.manifest.errors import OrreryError
from orrery.runtime.metrics import Row
from orrery.runtime.run_directory import metrics_dir, place

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

SUBJECTS = ("task", "policy", "engine", "process")  # names and indices, never measurements
STAMPS = ("time_s", "stage", "attempt", "step", "event", "version", *SUBJECTS)


def scalars(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the named numbers of a row. Skip texts, lists and nulls."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}/{name}")
        elif isinstance(value, int | float):
            yield f"{prefix}/{name}", float(value)


def named(process: str, row: Row) -> tuple[int | None, dict[str, float]]:
    step = row.get("step")
    step = row.get("version") if step is None else step
    subjects = [str(row[key]) for key in SUBJECTS if row.get(key) is not None]
    prefix = "/".join([row.get("event") or process.split(".")[0], *subjects])
    values = {key: value for key, value in row.items() if key not in STAMPS}
    return step, dict(scalars(values, prefix))


class TensorBoardSink:
    def __init__(self, run_dir: Path):
        self._folder = metrics_dir(run_dir) / "tensorboard"
        self._writers: dict[tuple[str, str], EventFileWriter] = {}
        self._first_s: float | None = None

    def write(self, process: str, row: Row) -> None:
        step, values = named(process, row)
        self._first_s = self._first_s or row["time_s"]
        if not values:
            return
        # Import late, because these imports are slow and not every stage writes rows.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        key = (str(row.get("stage")), process)
        if key not in self._writers:
            self._writers[key] = EventFileWriter(str(self._folder / key[0] / key[1]), flush_secs=10)
        found = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        step = int(row["time_s"] - self._first_s) if step is None else int(step)
        event = Event(wall_time=row["time_s"], step=step, summary=Summary(value=found))
        self._writers[key].add_event(event)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def configured() -> bool:
    """Return whether the site sets WANDB_PROJECT. An API key is not enough."""
    return bool(os.environ.get("WANDB_PROJECT"))


class WandbSink:
    """One W&B run per run directory, resumed over stages and attempts.

    `<stage>/step` is a separate value, because W&B's own step must never decrease.
    """

    def __init__(self, run_dir: Path):
        try:
            import wandb
        except ImportError:
            raise OrreryError(
                "WANDB_PROJECT is set, but wandb is not installed; type `uv pip install wandb`, "
                "or unset it"
            ) from None
        name, _, run_id = run_dir.name.rpartition("-")
        self._run = wandb.init(
            project=os.environ["WANDB_PROJECT"],
            name=run_dir.name,
            id=f"{run_id}-{place(run_dir)}",
            group=name,
            resume="allow",
            dir=str(metrics_dir(run_dir)),
        )
        self._defined: set[str] = set()

    def write(self, process: str, row: Row) -> None:
        step, values = named(process, row)
        if not values:
            return
        stage = str(row.get("stage"))
        if stage not in self._defined:
            self._defined.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        steps = {} if step is None else {f"{stage}/step": step}
        self._run.log({**{f"{stage}/{name}": value for name, value in values.items()}, **steps})

    def close(self) -> None:
        self._run.finish(quiet=True)
