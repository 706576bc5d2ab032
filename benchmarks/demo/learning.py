"""Run the demo under three seeds. Record its reward and wall time, and a picture.

- `learning.json`, `learning.png`: held-out reward before, during and after RL. The figure is the
  lowest of the seeds.
- `wall_time.json`: the seconds of every stage, and how the RL stage spent them, of seed 1.
- `--runs DIR` records finished runs of the checked-in manifests instead.
- A run with several attempts is refused, because its times include repeated work.
"""

import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from orrery.launcher.pipeline import checked_in
from orrery.manifest.identity import find_workspace
from orrery.observe.report.data import Row, RunData, shares

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT, parser_of, record
from workspace import linked

HERE = Path(__file__).resolve().parent
GROUP = "reverse_text_seeds"
COMMAND = ("snakemake", "--profile", "local", GROUP)
GOAL = 0.8
COLORS = ("#2f6fde", "#1f9d6b", "#c2701c")


def run_all(workspace: Path) -> float:
    """Run the pipeline of all seeds in a new workspace. Return its wall seconds."""
    linked(workspace)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    start_s = time.perf_counter()
    if code := subprocess.run(COMMAND, cwd=workspace, env=env).returncode:
        raise SystemExit(
            f"error: {' '.join(COMMAND)} ended with code {code}; "
            f"its runs and their logs are left in {workspace}"
        )
    return time.perf_counter() - start_s


def load_all(runs: Path) -> dict[str, RunData]:
    """Return the finished run of each checked-in seed by name."""
    found = {}
    for folder in checked_in(find_workspace(ROOT)).folders[GROUP]:
        if not (runs / folder / "stages" / "report" / "DONE").exists():
            raise SystemExit(
                f"error: {runs / folder}: no finished run of the checked-in manifest; "
                "run it there, or leave --runs out"
            )
        run = RunData.load(runs / folder)
        for row in run.usage:
            if row["attempt"] != run.stages[row["stage"]]["attempt"]:
                raise SystemExit(
                    f"error: {runs / folder}: stage {row['stage']} took several attempts; "
                    "measure a run that went through"
                )
        found[run.manifest.name] = run
    return found


def curve(run: RunData) -> list[tuple[int, float]]:
    """Return (version, mean held-out reward) of every evaluation during RL."""
    return sorted((row["version"], row["reward_mean"]) for row in run.evaluations)


def learning(run: RunData) -> dict[str, Any]:
    """Return the rewards of one run."""
    return {
        "before": run.result["before"]["reward_mean"],
        "after": run.result["after"]["reward_mean"],
        "num_rollouts": run.result["after"]["num_rollouts"],
        "first_step_at_goal": next(
            (version for version, reward in curve(run) if reward >= GOAL), None
        ),
        "curve": curve(run),
    }


def generated_tokens_per_s(batches: Sequence[Row]) -> float:
    """Return sampled tokens/s of all rollouts, dropped ones too, averaged over time."""
    spans_s = [after["time_s"] - before["time_s"] for before, after in pairwise(batches)]
    return sum(
        row["generated_tokens_per_s"] * span_s
        for row, span_s in zip(batches[1:], spans_s, strict=True)
    ) / sum(spans_s)


def trained_tokens_per_s(steps: Sequence[Row]) -> float:
    """Return trained tokens/s from the end of the first step to the end of the last."""
    return sum(row["num_trained_tokens"] for row in steps[1:]) / (
        steps[-1]["time_s"] - steps[0]["time_s"]
    )


def times(run: RunData) -> list[dict[str, Any]]:
    """Return the rows of one run's wall times, rates and shares."""

    def row(
        variant: str, value: float, unit: str, better: str, goal: float | None = None
    ) -> dict[str, Any]:
        return {"variant": variant, "value": value, "unit": unit, "better": better, "goal": goal}

    walls_s = {
        stage: done["wall_s"]
        for stage, done in sorted(run.stages.items(), key=lambda item: item[1]["started_s"])
    }
    goals = {"rl": 180.0}
    spent = shares(run.spans)
    assert spent is not None, "the run has no spans"
    pauses_s = [
        update["pause_s"] for update in run.updates if update["version"] > 0
    ]  # idle engines load version 0
    return [
        row("whole pipeline", sum(walls_s.values()), "s", "lower", 360.0),
        *(
            row(f"stage {stage}", wall_s, "s", "lower", goals.get(stage))
            for stage, wall_s in walls_s.items()
        ),
        row(
            "RL: tokens generated a second",
            generated_tokens_per_s(run.batches),
            "tokens/s",
            "higher",
        ),
        row("RL: tokens trained a second", trained_tokens_per_s(run.rl), "tokens/s", "higher"),
        row("RL: trainer busy", spent.trainer_busy, "share of time", "higher"),
        row("RL: engine busy", spent.engine_busy, "share of time", "higher"),
        row(
            "RL: engine busy while the trainer is",
            spent.overlapped,
            "share of trainer's busy time",
            "higher",
        ),
        row("RL: engine's pause an update", sum(pauses_s) / len(pauses_s), "s", "lower"),
    ]


def draw(runs: dict[str, RunData], path: Path) -> None:
    """Draw held-out reward over RL steps: one curve per seed, with the start and the goal."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, run), color in zip(runs.items(), COLORS, strict=True):
        found = learning(run)
        label = (
            f"seed {run.manifest.seed}: {found['before']:.2f} before RL, {found['after']:.2f} after"
        )
        axes.plot(
            *zip(*curve(run), strict=True),
            marker="o",
            markersize=4,
            linewidth=2,
            color=color,
            label=label,
            gid=name,
        )
    starts = [learning(run)["before"] for run in runs.values()]
    axes.axhline(sum(starts) / len(starts), color="#8a8f98", linestyle=":", linewidth=1.5)
    axes.axhline(GOAL, color="#d64545", linestyle="--", linewidth=1.5)
    right = max(version for run in runs.values() for version, _ in curve(run))
    axes.text(
        right,
        sum(starts) / len(starts) - 0.015,
        "start: mean of the seeds before RL",
        color="#6a6f78",
        ha="right",
        va="top",
    )
    axes.text(0, GOAL + 0.012, f"goal {GOAL:g}", color="#d64545", ha="left", va="bottom")
    model = next(iter(runs.values())).manifest
    axes.set(
        xlabel="RL step (policy version)",
        ylabel="held-out reward (share of characters in place)",
        ylim=(0, 1.03),
        title=f"{GROUP}: asynchronous RL, "
        f"at most {model.orchestrator.max_off_policy_steps} versions off policy",
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.02), frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def record_all(runs: dict[str, RunData], out: Path, pipeline_wall_s: float | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    by_seed = {name: learning(run) for name, run in runs.items()}
    origin = {
        "runs_made_by": " ".join(COMMAND),
        "runs_made_for_this_record": pipeline_wall_s is not None,
        "runs_started_at": {
            name: datetime.datetime.fromtimestamp(
                run.stages["init"]["started_s"], datetime.UTC
            ).isoformat(timespec="seconds")
            for name, run in runs.items()
        },
        "runs": {name: run.run_dir.name for name, run in runs.items()},
    }
    record(
        out / "learning.json",
        figure="held-out reward after RL, lowest of three seeds",
        value=min(seed["after"] for seed in by_seed.values()),
        unit="share of characters in place",
        goal=GOAL,
        better="higher",
        details={**origin, "seeds": by_seed},
    )
    draw(runs, out / "learning.png")
    rows = {name: times(run) for name, run in runs.items()}
    first, *others = rows
    record(
        out / "wall_time.json",
        figure="demo on CPU: wall time of the stages, and how RL spent it",
        value=rows[first][0]["value"],
        unit="s",
        goal=360.0,
        better="lower",
        rows=rows[first],
        details={
            **origin,
            "rows_are_of": first,
            "whole pipeline": "sum of the stages; Snakemake's own start is not in it",
            "all_seeds_with_snakemake_s": pipeline_wall_s,
            "other_seeds": {
                name: {row["variant"]: row["value"] for row in rows[name]} for name in others
            },
        },
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="DIR",
        help="record the finished runs in this runs/ folder; run nothing",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=HERE,
        help="write there instead of beside this script",
    )
    options = parser.parse_args()
    del sys.argv[1:]  # leave --runs out of the recorded command
    if options.runs is not None:
        record_all(load_all(options.runs.resolve()), options.out, None)
        return
    workspace = Path(tempfile.mkdtemp(prefix="orrery-demo-"))
    pipeline_wall_s = run_all(workspace)
    record_all(load_all(workspace / "runs"), options.out, pipeline_wall_s)
    shutil.rmtree(workspace)


if __name__ == "__main__":
    main()
