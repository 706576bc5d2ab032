"""Show a running stage as a panel or line, and send metric rows to TensorBoard and W&B.

- Metric names start with the row's event (`evaluation/<task>/reward_mean`), or its role.
- TensorBoard's step is the row's `step`, else its `version`, else seconds since the first row.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orrery.manifest.errors import OrreryError, explain_os_error
from orrery.runtime.health import FAILED, Health, listed
from orrery.runtime.metrics import MetricsTail, Row, used_by_process
from orrery.runtime.run_directory import metrics_dir, place

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

READ_S = 0.5
LIVE_S, PLAIN_S, QUIET_S = 0.5, 5.0, 60.0
MANY = 10  # with more processes, show a summary of each role
NUM_KINDS, NUM_ENDED = 3, 5


@dataclass
class Progress:
    run: str
    stage: str
    attempt: int
    stages: Sequence[str]
    finished: Sequence[str]
    num_steps: int | None
    started_s: float
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    usage: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, process: str, row: Row) -> None:
        if row.get("stage") != self.stage or row.get("attempt") != self.attempt:
            return
        role, event = process.split(".")[0], row.get("event")
        if event == "usage":
            self.usage.update(used_by_process(row))
        elif event == "batch":
            self._take(
                row, reward_mean="reward", staleness_mean="staleness", staleness_max="oldest"
            )
            if row.get("num_sampled"):
                self.values["without signal"] = row["num_without_signal"] / row["num_sampled"]
            self._take(row, generated_tokens_per_s="generated tokens/s", num_in_flight="in flight")
            if isinstance(row.get("reward_mean"), int | float):
                self.rewards.append(row["reward_mean"])
        elif event == "admission":
            self._take(row, num_in_flight="in flight", limit="at most")
        elif event == "evaluation":
            if isinstance(row.get("reward_mean"), int | float) and "task" in row:
                self.held_out[row["task"]] = row["reward_mean"]
        elif event == "validation":
            self._take(row, validation_loss="validation loss")
        elif event == "update":
            self._take(row, version="version")
        elif role == "trainer" and process.endswith(".0") and row.get("step") is not None:
            self.step = max(self.step, row["step"])
            self._take(row, loss="loss", tokens_per_s="trainer tokens/s")
            self._take(row, mismatch_kl="mismatch KL", entropy="entropy")

    def _take(self, row: Row, **names: str) -> None:
        self.values.update(
            {name: row[key] for key, name in names.items() if isinstance(row.get(key), int | float)}
        )


def line(progress: Progress, health: Mapping[str, Health], now_s: float) -> str:
    """Return a log line: `rl 12/40 · reward 0.43 · … · trainer.0 waiting 1 s …`."""
    parts = [f"{progress.stage} {_steps(progress)}"]
    parts += [f"{name} {value}" for name, value in _numbers(progress)]
    talking = {name: one for name, one in health.items() if one.role != "router"}
    parts += [f"{name} {one.sentence(now_s)}" for name, one in talking.items()]
    return f"[{_clock(now_s - progress.started_s)}] " + " · ".join(parts)


def panel(
    progress: Progress,
    health: Mapping[str, Health],
    states: Mapping[str, str],
    now_s: float,
    instead: Sequence[str] = (),
) -> RenderableType:
    stages = Text()
    for stage in progress.stages:
        done, here = stage in progress.finished, stage == progress.stage
        stages.append(
            f"{'✓' if done else '▶' if here else '·'} {stage}   ",
            style="green" if done else "bold cyan" if here else "dim",
        )
    numbers = Table.grid(padding=(0, 3))
    cells = [f"{name} [bold]{escape(value)}[/bold]" for name, value in _numbers(progress)]
    for start in range(0, len(cells), 4):
        numbers.add_row(*cells[start : start + 4])
    roles = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("process", "state", "does", "cpu", "memory"):
        is_number = column in ("cpu", "memory")
        justify: Literal["right", "left"] = "right" if is_number else "left"
        roles.add_column(column, justify=justify, no_wrap=column != "does")
    for name, state in states.items():
        one, used = health.get(name), progress.usage.get(name, {}) if state == "running" else {}
        roles.add_row(
            name,
            state,
            one.sentence(now_s) if one else "starting",
            f"{used['cpu_percent']:.0f} %" if "cpu_percent" in used else "",
            f"{used['rss_bytes'] / 2**20:.0f} MiB" if "rss_bytes" in used else "",
        )
    head = Table.grid(padding=(0, 2))
    head.add_row(
        f"step [bold]{_steps(progress)}[/bold]",
        ProgressBar(total=progress.num_steps or 1, completed=progress.step, width=30),
        Text(sparkline(progress.rewards[-40:]), style="green"),
    )
    title = f"{progress.run} · attempt {progress.attempt} · {_clock(now_s - progress.started_s)}"
    below = Text("\n".join(instead)) if instead else roles
    return Panel(
        Group(stages, head, numbers, Text(), below),
        title=title,
        title_align="left",
        border_style="cyan",
    )


def _numbers(progress: Progress) -> list[tuple[str, str]]:
    rewards = {task: _short(reward) for task, reward in progress.held_out.items()}
    held_out = ", ".join(f"{task} {reward}" for task, reward in rewards.items())
    if len(rewards) == 1:
        held_out = next(iter(rewards.values()))
    numbers = [(name, _short(value)) for name, value in progress.values.items()]
    return [*numbers, ("held-out reward", held_out)] if held_out else numbers


def sparkline(values: Sequence[float]) -> str:
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[min(len(bars) - 1, max(0, int(value * len(bars))))] for value in values)


def _steps(progress: Progress) -> str:
    if progress.num_steps:
        return f"{progress.step}/{progress.num_steps}"
    return str(progress.step) if progress.step else "…"


def _short(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    days, rest_s = divmod(max(0, int(seconds)), 86400)
    text = time.strftime("%H:%M:%S" if seconds >= 3600 else "%M:%S", time.gmtime(rest_s))
    return f"{days} d {text}" if days else text


class View:
    def __init__(self, progress: Progress):
        self._progress = progress
        self._console = Console(stderr=True)
        redraws = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        if redraws:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._every_s = LIVE_S if self._live else PLAIN_S
        self._next_s = time.monotonic() + (0 if self._live else PLAIN_S)
        self._said: tuple[int, list[str]] | None = None
        self._said_s = 0.0
        if self._live:
            self._live.start()

    def draw(self, health: Mapping[str, Health], states: Mapping[str, str]) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        wall_s, is_large = time.time(), len(states) > MANY
        if self._live:
            roles = summary(health, states, wall_s) if is_large else ()
            self._live.update(panel(self._progress, health, states, wall_s, roles), refresh=True)
        elif not is_large:
            print(line(self._progress, health, wall_s), file=sys.stderr, flush=True)
        else:
            news = self._progress.step, ended(health, states)
            if news != self._said or now_s >= self._said_s + QUIET_S:
                self._said, self._said_s = news, now_s
                parts = [line(self._progress, {}, wall_s), *summary(health, states, wall_s)]
                print(" · ".join(parts), file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live:
            self._live.stop()


def ended(health: Mapping[str, Health], states: Mapping[str, str]) -> list[str]:
    failed = {name for name, one in health.items() if one.doing == FAILED}
    good = ("running", "exit code 0")
    return [name for name, state in states.items() if state not in good or name in failed]


def summary(health: Mapping[str, Health], states: Mapping[str, str], now_s: float) -> list[str]:
    by_role: dict[str, Counter[str]] = {}
    for name, state in states.items():
        one = health.get(name)
        if state == "running":
            state = "starting" if one is None else "waiting" if one.wait else one.doing
        by_role.setdefault(name.rpartition(".")[0], Counter())[state] += 1
    parts = []
    for role, counts in by_role.items():
        named = counts.most_common(NUM_KINDS)
        others = counts.total() - sum(number for _, number in named)
        named += [("otherwise", others)] if others else []
        parts.append(f"{role}: " + ", ".join(f"{number} {does}" for does, number in named))
    if gone := ended(health, states):
        more = f" and {len(gone) - NUM_ENDED} more" if len(gone) > NUM_ENDED else ""
        parts.append(f"failed or ended: {listed(gone[:NUM_ENDED])}{more}")
    since_s = {}
    for name, one in health.items():
        is_running = states.get(name) == "running" and name not in gone
        if is_running and one.role != "router" and (one.wait or one.step is not None):
            since_s[name] = one.wait.since_s if one.wait else one.since_s
    if since_s:
        slowest = min(since_s, key=lambda name: since_s[name])
        parts.append(f"slowest: {slowest} {health[slowest].sentence(now_s)}")
    return parts


SUBJECTS = ("task", "policy", "engine", "process")  # fields in metric names
STAMPS = ("time_s", "stage", "attempt", "step", "event", "version", *SUBJECTS)


def scalars(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
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


class Sink(Protocol):
    def write(self, process: str, row: Row) -> None: ...

    def close(self) -> None: ...


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
        # These imports are slow.
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
    return bool(os.environ.get("WANDB_PROJECT"))


class WandbSink:
    """One W&B run per run directory, resumed over stages and attempts.

    `<stage>/step` is a separate value, because W&B's step must not decrease.
    """

    def __init__(self, run_dir: Path):
        try:
            import wandb
        except ImportError:
            raise OrreryError(
                "WANDB_PROJECT is set, but wandb is not installed; type `uv pip install wandb`, "
                "or unset WANDB_PROJECT"
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


class Observer:
    def __init__(self, run_dir: Path, progress: Progress):
        self._progress, self._tail = progress, MetricsTail(run_dir, from_end=True)
        self._sinks: list[Sink] = []
        kinds: list[type[TensorBoardSink] | type[WandbSink]] = [TensorBoardSink]
        kinds += [WandbSink] if configured() else []
        for kind in kinds:
            with self._dropping(kind):
                self._sinks.append(kind(run_dir))
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(READ_S)
            self._read()
        for sink in self._sinks:
            with self._dropping(sink):
                sink.close()

    def _read(self) -> None:
        try:
            for process, row in self._tail.new_rows():
                for sink in self._sinks:
                    with self._dropping(sink):
                        sink.write(process, row)
                self._progress.add(process, row)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                why = f"({explain_os_error(error)}); tried again every {READ_S:g} s"
                print(f"warning: metrics cannot be read {why}", file=sys.stderr, flush=True)
            self._has_failed = True

    @contextmanager
    def _dropping(self, sink: Sink | type) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._sinks = [one for one in self._sinks if one is not sink]
            name = sink.__name__ if isinstance(sink, type) else type(sink).__name__
            print(f"warning: {name} is dropped: {error}", file=sys.stderr, flush=True)
