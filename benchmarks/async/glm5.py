"""Show that a GLM-5 in FP8 learns on one GPU, and compare its attention's chosen keys with vLLM's.

    bash benchmarks/async/gpu_host.sh figure glm5.py        # on a GPU host, six minutes
    python benchmarks/async/glm5.py --runs runs             # from finished runs

- `glm5.json` has a row per seed with `STEPS` RL steps: held-out reward before, after and by step.
  The figure is the lowest reward after RL.
- `glm5_mismatch.json` has a row per way in which the trainer chooses keys (replay of vLLM's, or its
  own): the KL between engine and trainer, over that with dense attention in both. KLs are means
  over `STEPS` steps and over tokens sampled by the trained weights. All `KINDS` must have run.
- `choices_differ`: share of vLLM's keys that the trainer's indexers did not choose.
- Without `--runs`, run seed `--seed` and, in parallel unless `--alone`, the other two `KINDS`. All
  runs end after `--within` seconds. `--out` gets logs and metrics, also of failures.
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from learning import curve
from made_runs import make_runs
from matplotlib import pyplot
from shapes import checked_in

from orrery.observe.report.data import RunData

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import parser_of, record

HERE = Path(__file__).resolve().parent
RUN, SEEDS, STEPS = "glm5_reverse_text", (1, 2, 3), 8
KINDS = {"replay": f"{RUN}_seed_1", "own choice": f"{RUN}_compare", "dense": f"{RUN}_dense"}
GOAL, MOST_BEFORE, KL_GOAL = 0.9, 0.4, 1.2


def found_run(name: str, runs: Path) -> RunData | None:
    """Return the run, or None if its RL stage has made fewer than `STEPS` steps."""
    for folder in sorted(runs.glob(f"{name}-????????????")):
        data = RunData.load(folder)
        if len(data.rl) >= STEPS:
            return data
    print(f"left out: {name} (fewer than {STEPS} steps)")
    return None


def mean_of(run: RunData, name: str) -> float | None:
    found = [row[name] for row in run.rl[:STEPS] if row.get(name) is not None]
    return sum(found) / len(found) if found else None


def seed_row(seed: int, run: RunData) -> dict[str, Any]:
    points = curve(run)
    return {
        "variant": f"seed {seed}",
        "value": points[-1][2],
        "goal": GOAL,
        "before": points[0][2],
        "most_before": MOST_BEFORE,
        "run": run.run_dir.name,
        "steps": [
            {name: row.get(name) for name in ("step", "mismatch_kl_same_weights", "choices_differ")}
            for row in run.rl
        ],
        "choices_missing": sum(row.get("choices_missing") or 0 for row in run.rl),
        "curve": points,
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


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print({name: value for name, value in row.items() if name not in ("steps", "curve")})


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
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, choices=SEEDS, default=1)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--within", type=float, default=330.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, metavar="DIR", default=HERE)
    options = parser.parse_args()
    runs = options.runs
    if runs is None:
        made = [f"{RUN}_seed_{options.seed}"]
        made += [] if options.alone else [KINDS["own choice"], KINDS["dense"]]
        archive = options.out / "glm5_runs.tar.gz"
        runs = make_runs([*map(checked_in, made)], options.within, archive, parallel=2)
    of_seed = {seed: f"{RUN}_seed_{seed}" for seed in SEEDS}
    names = dict.fromkeys([*of_seed.values(), *KINDS.values()])
    found = {name: run for name in names if (run := found_run(name, runs)) is not None}
    seeds = {seed: found[name] for seed, name in of_seed.items() if name in found}
    if not seeds:
        raise SystemExit("error: no seed has made enough steps; read the logs, or raise --within")
    kinds = {kind: found[name] for kind, name in KINDS.items() if name in found}
    rows = [seed_row(seed, run) for seed, run in seeds.items()]
    show(rows)
    draw(seeds, options.out / "glm5.png")
    record(
        options.out / "glm5.json",
        figure="a GLM-5 in FP8 writes words backwards: held-out reward after RL, lowest seed",
        value=min(row["value"] for row in rows),
        unit="reward",
        goal=GOAL,
        better="higher",
        details={"seeds": list(seeds)},
        rows=rows,
    )
    if kinds.keys() < KINDS.keys():
        return
    rows = kind_rows(kinds)
    show(rows)
    record(
        options.out / "glm5_mismatch.json",
        figure="a GLM-5 in FP8: mismatch KL with replayed keys over that of dense attention",
        value=rows[0]["value"],
        unit="×",
        goal=KL_GOAL,
        better="lower",
        rows=rows,
    )


if __name__ == "__main__":
    main()
