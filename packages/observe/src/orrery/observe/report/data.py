"""What a report needs of a run directory, read once and tidied.

- In: `metrics/`, `stages/`, `rollouts/`, `manifest.json` of one run directory. Nothing else is opened.
- Out: `RunData`; a file that is not there is an empty list, so a report of an unfinished run is a shorter report.
- Always: for a step that ran in several attempts, the newest attempt's row stands (`observe.metrics.read`). Spans are of the newest
  attempt alone: between two attempts nobody worked.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest
from orrery.observe.metrics import Row, read, rows

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """One named stretch of a role's time, in seconds of the host's clock."""

    role: str
    name: str
    start_s: float
    end_s: float
    step: int | None


@dataclass(frozen=True)
class RunData:
    """Everything the page shows, before any drawing."""

    run_dir: Path
    manifest: Manifest
    stages: dict[str, Row]  # stage -> its DONE marker
    rl: list[Row]  # trainer rows of the RL stage, by step
    sft: list[Row]
    validation: list[Row]  # losses on examples that SFT never trains
    compared: list[Row]  # log-probs of the last version, trainer against engine
    batches: list[Row]
    evaluations: list[Row]
    updates: list[Row]
    engine_restarts: list[Row]
    admission: list[Row]  # rollouts in flight and their limit, where it follows the engines
    engines: list[Row]  # what engines say of themselves
    usage: list[Row]
    spans: list[Span]  # of the RL stage's newest attempt
    result: Row  # stages/evaluate/result.json
    evaluated: list[Row]  # decoded rollouts of the evaluate stage

    @classmethod
    def load(cls, run_dir: Path) -> "RunData":
        """Raises OrreryError where `run_dir` holds no valid manifest."""
        manifest = load(run_dir / "manifest.json")
        metrics = run_dir / "metrics"
        trainer = read(metrics / "trainer.0.jsonl")
        orchestrator = read(metrics / "orchestrator.0.jsonl")

        def event(name: str) -> list[Row]:
            return [row for row in orchestrator if row.get("event") == name and row.get("stage") == "rl"]

        stages = [path.parent.name for path in (run_dir / "stages").glob("*/DONE")]
        return cls(
            run_dir=run_dir,
            manifest=manifest,
            stages={stage: json.loads((run_dir / "stages" / stage / "DONE").read_text()) for stage in stages},
            rl=[row for row in trainer if row.get("stage") == "rl" and row.get("step") is not None and row.get("event") is None],
            sft=[row for row in trainer if row.get("stage") == "sft" and row.get("step") is not None and row.get("event") is None],
            validation=[row for row in trainer if row.get("event") == "validation"],
            compared=[row for row in trainer if row.get("event") == "compare"],
            batches=event("batch"),
            evaluations=event("evaluation"),
            updates=event("update"),
            engine_restarts=[row for row in read(metrics / "launcher.0.jsonl") if row.get("event") == "engine_restart"],
            admission=event("admission"),
            engines=event("engine"),
            usage=_usage(metrics),
            spans=_spans(metrics),
            result=_json(run_dir / "stages" / "evaluate" / "result.json"),
            evaluated=list(rows(run_dir / "rollouts" / "evaluate.jsonl")),
        )


def same_weights(run: RunData) -> list[tuple[int, float]]:
    """(policy version, largest |Δ log-prob| between trainer and engine on tokens of that version alone), where there were such tokens."""
    key = "logprob_max_abs_diff_same_weights"
    found = [(row["step"] - 1, row[key]) for row in run.rl if row.get(key) is not None]
    return found + [(row["version"], row[key]) for row in run.compared[-1:]]


def _json(path: Path) -> Row:
    return json.loads(path.read_text()) if path.exists() else {}


def wall_s(run: RunData, *left_out: str) -> float:
    """Seconds of work on the finished stages; of an attempt that came to nothing, from its launcher's first row to its last."""
    attempts: dict[tuple[str, int], list[float]] = {}
    for row in run.usage:
        attempts.setdefault((row["stage"], row["attempt"]), []).append(row["time_s"])
    finished = {stage: done for stage, done in run.stages.items() if stage not in left_out}
    lost = [max(times) - min(times) for (stage, one), times in attempts.items() if stage in finished and one != finished[stage]["attempt"]]
    return sum(done["wall_s"] for done in finished.values()) + sum(lost)


def _usage(metrics: Path) -> list[Row]:
    """Every process's rows of its own processor time and memory, oldest first."""
    files = (path for path in metrics.glob("*.jsonl") if not path.name.endswith(".spans.jsonl"))
    found = (row for path in files for row in rows(path) if row.get("event") == "usage")
    return sorted(found, key=lambda row: row["time_s"])


def _spans(metrics: Path) -> list[Span]:
    """Spans of the RL stage's newest attempt, by whoever they are about: an engine's work is recorded by the orchestrator."""
    found = [
        (path.name.removesuffix(".spans.jsonl"), row)
        for path in sorted(metrics.glob("*.spans.jsonl"))
        for row in rows(path)
        if row.get("stage") == "rl"
    ]
    newest = max((row["attempt"] for _, row in found), default=None)
    return [
        Span(
            role=f"inference.{row['engine']}" if "engine" in row else role,
            name=row["name"],
            start_s=row["start_s"],
            end_s=row["end_s"],
            step=row.get("step"),
        )
        for role, row in found
        if row["attempt"] == newest
    ]


def union(intervals: list[Interval]) -> list[Interval]:
    """Overlapping intervals merged, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap_s(left: list[Interval], right: list[Interval]) -> float:
    """Seconds that lie in both unions."""
    left, right, total, i, j = union(left), union(right), 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


@dataclass(frozen=True)
class Shares:
    """How the time of the RL stage's newest attempt was spent, between the first and the last batch."""

    window_s: float
    trainer_busy: float  # share of the window in forward, backward or optimizer
    engine_busy: float  # share in which at least one engine had a request in flight
    overlapped: float  # share of the trainer's busy time in which an engine was generating


def shares(spans: list[Span]) -> Shares | None:
    """None where there is no training to speak of."""
    training = [(s.start_s, s.end_s) for s in spans if s.role.startswith("trainer.0") and s.name in ("forward_backward", "optimizer")]
    generating = [(s.start_s, s.end_s) for s in spans if s.role.startswith("inference.") and s.name == "generate"]
    if not training:
        return None
    start = min([*training, *generating])[0]
    window = [(start, max(end for _, end in training))]
    window_s = window[0][1] - start
    busy_s = overlap_s(training, window)
    return Shares(window_s, busy_s / window_s, overlap_s(generating, window) / window_s, overlap_s(training, generating) / busy_s)
