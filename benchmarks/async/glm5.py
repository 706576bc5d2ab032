"""Record whether a GLM-5 in FP8 learns on one GPU, and how far its keys and vLLM's differ.

    bash benchmarks/async/gpu_host.sh run glm5_reverse_text_seed_1 glm5_reverse_text_compare \
        glm5_reverse_text_dense
    python benchmarks/async/glm5.py --runs runs

- A row per seed: held-out reward before and after RL, and its curve. The figure is the lowest
  reward after RL.
- A row per way to choose keys: the mismatch KL over that of dense attention on both sides. Each is
  a mean over `STEPS` steps from equal seeds, and over tokens that the trained weights sampled.
- `choices_differ`: share of vLLM's keys that the trainer's indexers did not choose.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from learning import curve, finished
from matplotlib import pyplot

from orrery.observe.report.data import RunData

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import record

HERE = Path(__file__).resolve().parent
RUN, SEEDS, STEPS = "glm5_reverse_text", (1, 2, 3), 8
KINDS = {"replay": f"{RUN}_seed_1", "own choice": f"{RUN}_compare", "dense": f"{RUN}_dense"}
GOAL, MOST_BEFORE, KL_GOAL = 0.9, 0.4, 1.2


def mean_of(run: RunData, name: str) -> float | None:
    found = [row[name] for row in run.rl[:STEPS] if row.get(name) is not None]
    return sum(found) / len(found) if found else None


def seed_row(seed: int, run: RunData) -> dict[str, Any]:
    before, after = run.result["before"]["reward_mean"], run.result["after"]["reward_mean"]
    return {
        "variant": f"seed {seed}",
        "value": after,
        "goal": GOAL,
        "before": before,
        "most_before": MOST_BEFORE,
        "run": run.run_dir.name,
        "rl_wall_s": run.stages["rl"]["wall_s"],
        "steps": [
            {name: row.get(name) for name in ("step", "mismatch_kl_same_weights", "choices_differ")}
            for row in run.rl
        ],
        "choices_missing": sum(row.get("choices_missing") or 0 for row in run.rl),
        "curve": curve(run),
    }


def kind_rows(runs: dict[str, RunData]) -> list[dict[str, Any]]:
    kl = {kind: mean_of(run, "mismatch_kl_same_weights") for kind, run in runs.items()}
    rows = []
    for kind, run in runs.items():
        own, dense = kl[kind], kl.get("dense")
        if kind != "dense" and own is not None and dense:
            row = {"value": own / dense, "goal": KL_GOAL if kind == "replay" else None}
            rows.append(
                {"variant": f"KL, {kind}, over dense", "unit": "×", "better": "lower"}
                | row
                | {"kl": own, "dense_kl": dense, "choices_differ": mean_of(run, "choices_differ")}
                | {"routes_differ": mean_of(run, "routes_differ")}
            )
    return rows


def draw(seeds: dict[int, RunData], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(5, 4), layout="constrained")
    for seed, run in seeds.items():
        versions, _, rewards = zip(*curve(run), strict=True)
        axes.plot(versions, rewards, linewidth=2, label=f"seed {seed}")
    axes.set(xlabel="RL step (policy version)", ylabel="held-out reward", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, metavar="DIR", required=True)
    parser.add_argument("--out", type=Path, metavar="DIR", default=HERE)
    options = parser.parse_args()
    all_seeds = {seed: finished(f"{RUN}_seed_{seed}", options.runs) for seed in SEEDS}
    seeds = {seed: run for seed, run in all_seeds.items() if run is not None}
    if not seeds:
        raise SystemExit(f"error: {options.runs} has no finished {RUN}_seed_1; run it there first")
    all_kinds = {kind: finished(name, options.runs) for kind, name in KINDS.items()}
    kinds = {kind: run for kind, run in all_kinds.items() if run is not None}
    rows = [seed_row(seed, run) for seed, run in seeds.items()]
    draw(seeds, options.out / "glm5.png")
    record(
        options.out / "glm5.json",
        figure="a GLM-5 in FP8 writes words backwards: held-out reward after RL, lowest seed",
        value=min(row["value"] for row in rows),
        unit="reward",
        goal=GOAL,
        better="higher",
        rows=[*rows, *kind_rows(kinds)],
    )


if __name__ == "__main__":
    main()
