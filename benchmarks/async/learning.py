"""Record whether a pretrained model learns, in runs of smollm2.jsonnet and its staleness variants.

    python benchmarks/async/learning.py --runs runs
    python benchmarks/async/learning.py --runs runs --problems smollm2_problems

- `learning.json`, `learning.png`: a row per task with the rise of its held-out reward (mean over
  seeds) and the largest mismatch KL of any step. The figure is the lowest rise.
- `staleness.json`, `staleness.png`: reward against wall time, a row per staleness bound.
- The runs must be of the checked-in manifests. A task without a finished run keeps its recorded
  row. A staleness bound without a run is left out and named.
- `problems_<device>.json`, `.png`: one-GPU runs whose names begin with `--problems`. A row per run:
  rise of held-out reward, entropy, truncated answers, tokens/s. No other file is written then.
- For runs of another machine, ORRERY_HARDWARE and ORRERY_COMMIT name its hardware and commit.
"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from shapes import numbers

from orrery.manifest.identity import load, run_dir
from orrery.observe.report.data import RunData

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT, device, parser_of, record

HERE = Path(__file__).resolve().parent
SEEDS, BOUNDS = (1, 2, 3), (0, 1, 2, 4, 8)
TASKS = ("reverse_words", "arithmetic", "calculator")
TASKS_AT_LEAST = 2  # tasks with runs of every seed, without which the record has no goal
GOAL = 0.3  # least rise of held-out reward
KL_GOAL = 1e-3  # most KL of engine and trainer with the same weights, in any step
PROBLEMS_GOALS = {"rise": 0.15, "entropy": 0.3, "truncated": 0.1}
SMOOTHED_STEPS = 3  # window of the entropy's moving average


def finished(name: str, runs: Path) -> RunData | None:
    """Return the finished run of a checked-in manifest, or None."""
    folder = run_dir(runs, load(ROOT / "manifests" / f"{name}.json"))
    if not (folder / "stages" / "evaluate" / "DONE").exists():
        print(f"left out: {name} ({folder.name} has not finished there)")
        return None
    return RunData.load(folder)


def curve(run: RunData) -> list[tuple[int, float, float]]:
    """Return (version, seconds since generation began, held-out reward) of every evaluation."""
    start_s = min(span.start_s for span in run.spans if span.name == "generate")
    return sorted(
        (row["version"], row["end_s"] - start_s, row["reward_mean"]) for row in run.evaluations
    )


def said(run: RunData) -> dict[str, Any]:
    """Return the results of one run."""
    before, after = run.result["before"]["reward_mean"], run.result["after"]["reward_mean"]
    attempt = json.loads((run.run_dir / "receipt.json").read_text())["stages"]["rl"]["attempts"][-1]
    same = [kl for row in run.rl if (kl := row.get("mismatch_kl_same_weights")) is not None]
    return {
        "run": run.run_dir.name,
        "before": before,
        "after": after,
        "rise": after - before,
        # On tokens of the trained weights, engine and trainer differ only in numerics.
        "mismatch_kl_max": max(same, default=None),
        "mismatch_kl_steps": len(same),
        "kl_to_sampling_policy_max": max(row["mismatch_kl"] for row in run.rl),  # with staleness
        "staleness_mean": sum(row["staleness_mean"] for row in run.batches) / len(run.batches),
        "rl_wall_s": run.stages["rl"]["wall_s"],
        "code": {name: attempt["code"].get(name) for name in ("commit", "diff_sha256")},
        "started_at": datetime.fromtimestamp(attempt["started_s"], UTC).isoformat(
            timespec="seconds"
        ),
        "versions": attempt["versions"],
        "curve": curve(run),
    }


def task_row(task: str, seeds: dict[int, RunData]) -> dict[str, Any]:
    each = {str(seed): said(run) for seed, run in seeds.items()}
    rise = sum(one["rise"] for one in each.values()) / len(each)
    worst = max(
        (one["mismatch_kl_max"] for one in each.values() if one["mismatch_kl_max"] is not None),
        default=None,
    )
    return {
        "variant": task,
        "value": rise,
        "unit": "reward",
        "better": "higher",
        "goal": GOAL,
        "mismatch_kl_max": worst,
        "seeds": each,
    }


def by_task(runs: dict[str, dict[int, RunData]], out: Path) -> None:
    path = out / "learning.json"
    before = (
        {row["variant"]: row for row in json.loads(path.read_bytes())["rows"]}
        if path.exists()
        else {}
    )
    by_name = before | {task: task_row(task, seeds) for task, seeds in runs.items()}
    rows = [by_name[task] for task in TASKS if task in by_name]
    missing = [
        f"{task} seed {seed}"
        for task in TASKS
        for seed in SEEDS
        if str(seed) not in by_name.get(task, {"seeds": {}})["seeds"]
    ]
    whole = [row for row in rows if len(row["seeds"]) == len(SEEDS)]
    record(
        path,
        figure="SmolLM2-135M-Instruct: rise of held-out reward by RL, mean of the seeds, "
        "lowest of the tasks",
        value=min(row["value"] for row in rows),
        unit="reward",
        goal=GOAL
        if len(whole) >= TASKS_AT_LEAST
        else None,  # a mean over a part of the runs would mislead
        better="higher",
        details={
            "missing": missing,
            "mismatch_kl_goal": KL_GOAL,
            "mismatch_kl_max": max(
                (row["mismatch_kl_max"] for row in rows if row["mismatch_kl_max"] is not None),
                default=None,
            ),
        },
        rows=rows,
    )
    figure, panels = pyplot.subplots(
        1, len(rows), figsize=(4.5 * len(rows), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for row, axes in zip(rows, panels[0], strict=True):
        for seed, run in row["seeds"].items():
            versions, _, rewards = zip(*run["curve"], strict=True)
            axes.plot(versions, rewards, linewidth=2, label=f"seed {seed}")
        axes.set(title=row["variant"], xlabel="RL step (policy version)", ylim=(0, 1.02))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    panels[0][0].set_ylabel("held-out reward")
    figure.savefig(out / "learning.png", dpi=140, metadata={"Software": None})
    pyplot.close(figure)


def by_bound(runs: dict[int, RunData], out: Path) -> None:
    each = {bound: said(run) for bound, run in runs.items()}
    record(
        out / "staleness.json",
        figure="reverse_words: held-out reward after RL, lowest of the bounds of staleness",
        value=min(one["after"] for one in each.values()),
        unit="reward",
        goal=None,
        better="higher",
        rows=[
            {
                "variant": f"bound {bound}",
                "value": one["after"],
                "unit": "reward",
                "better": "higher",
                "goal": None,
                **one,
            }
            for bound, one in each.items()
        ],
    )
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for bound, run in runs.items():
        _, seconds, rewards = zip(*curve(run), strict=True)
        axes.plot(seconds, rewards, linewidth=2, label=f"at most {bound} versions off policy")
    axes.set(xlabel="seconds since the first request", ylabel="held-out reward", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(out / "staleness.png", dpi=140, metadata={"Software": None})
    pyplot.close(figure)


def problems_row(run: RunData) -> dict[str, Any]:
    """Return the results of a run on a file of problems. Entropy is that of trained tokens."""
    entropy = np.array([row["entropy"] for row in run.rl], dtype=np.float64)
    smooth = np.convolve(entropy, np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS, mode="valid")
    cut = {
        policy: [row["truncated"] for row in run.evaluated if row["policy"] == policy]
        for policy in ("before", "after")
    }
    results = said(run)
    return {
        "variant": run.manifest.name,
        "value": results["rise"],
        "unit": "reward",
        "better": "higher",
        "goal": PROBLEMS_GOALS["rise"],
        "entropy_first": float(smooth[0]),
        "entropy_least": float(smooth.min()),
        "entropy_share": float(smooth.min() / smooth[0]),
        "truncated_before": float(np.mean(cut["before"])),
        "truncated_after": float(np.mean(cut["after"])),
        "truncated_trained_mean": float(np.mean([r["truncated_share"] for r in run.batches])),
        "wall_s": {stage: done["wall_s"] for stage, done in run.stages.items()},
        "speed": numbers(run, float("inf")).row("whole loop"),
        **results,
    }


def by_problems(prefix: str, runs: Path, out: Path) -> None:
    """Record the finished runs whose names begin with `prefix`. Raise SystemExit without any."""
    folders = sorted(runs.glob(f"{prefix}*-????????????"))
    found = [
        RunData.load(each) for each in folders if (each / "stages" / "evaluate" / "DONE").exists()
    ]
    if not found:
        raise SystemExit(
            f"error: {runs}: no run {prefix}* has finished there; `gpu_host.sh run` one first"
        )
    rows = [problems_row(run) for run in found]

    def summary(
        name: str, value: float, unit: str, better: str, goal: str | None
    ) -> dict[str, Any]:
        limit = None if goal is None else PROBLEMS_GOALS[goal]
        return {"variant": name, "value": value, "unit": unit, "better": better, "goal": limit}

    record(
        out / f"problems_{device()}.json",
        figure=f"SmolLM2-135M-Instruct, a file of problems, one GPU ({device()}): rise of held-out "
        "reward by RL, lowest of the seeds",
        value=min(row["value"] for row in rows),
        unit="reward",
        goal=PROBLEMS_GOALS["rise"],
        better="higher",
        rows=[
            *rows,
            summary("entropy", min(r["entropy_share"] for r in rows), "share", "higher", "entropy"),
            summary(
                "truncated", max(r["truncated_after"] for r in rows), "share", "lower", "truncated"
            ),
            summary(
                "tokens/s",
                float(np.mean([r["speed"]["value"] for r in rows])),
                "tokens/s",
                "higher",
                None,
            ),
            summary("wall time", max(sum(r["wall_s"].values()) for r in rows), "s", "lower", None),
        ],
    )
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run in found:
        versions, _, rewards = zip(*curve(run), strict=True)
        axes.plot(versions, rewards, linewidth=2, label=run.manifest.name)
    axes.set(xlabel="RL step (policy version)", ylabel="held-out reward", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(out / f"problems_{device()}.png", dpi=140, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, metavar="DIR", default=ROOT / "runs")
    parser.add_argument("--out", type=Path, metavar="DIR", default=HERE)
    parser.add_argument("--problems", metavar="PREFIX")
    options = parser.parse_args()
    if options.problems is not None:
        by_problems(options.problems, options.runs, options.out)
        return
    found = {
        task: {seed: finished(f"smollm2_{task}_seed_{seed}", options.runs) for seed in SEEDS}
        for task in TASKS
    }
    runs = {
        task: {seed: run for seed, run in seeds.items() if run is not None}
        for task, seeds in found.items()
    }
    bounds = {
        bound: run
        for bound in BOUNDS
        if (run := finished(f"smollm2_staleness_{bound}", options.runs)) is not None
    }
    if learned := {task: seeds for task, seeds in runs.items() if seeds}:
        by_task(learned, options.out)
    if len(bounds) > 1:
        by_bound(bounds, options.out)
    if not learned and len(bounds) < 2:
        raise SystemExit(
            f"error: {options.runs}: no finished run of these manifests; "
            "run one there, for example `gpu_host.sh run`"
        )


if __name__ == "__main__":
    main()
