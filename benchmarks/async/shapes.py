"""Make and read the runs of asynchrony.py and whole_loop.py (jsonnet/runs/asynchrony.jsonnet).

- `run` runs the init and rl stages in a new workspace. `numbers` reads the results.
- Measured steps come after step WARM_STEPS and before the last batch was taken. Earlier steps
  compile and fill the engines. Later steps train while engines idle.
- A step with over MOST_OF_MEDIAN times the median seconds per token is an error: it compiled.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orrery.manifest.machine import this_machine
from orrery.observe.report.data import Interval, RunData, overlap_s, shares

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT
from workspace import whole_workspace

SHAPES = ("cpu", "h200_1", "h200_2", "h200_4", "h200_8", "glm5_4", "glm5_8")
WARM_STEPS = 4
MOST_OF_MEDIAN = 3.0


def run(name: str, runs: Path | None) -> RunData:
    """Return the run `name` from the folder `runs`, or run it now. Raise SystemExit on failure.

    A run from a folder must have trained all its steps, but needs no final checkpoint.
    """
    if runs is not None:
        found = [RunData.load(each) for each in sorted(runs.glob(f"{name}-????????????"))]
        whole = [
            each
            for each in found
            if (rl := each.manifest.stages.rl) is not None and len(each.rl) == rl.num_steps
        ]
        if len(whole) != 1:
            raise SystemExit(
                f"error: {runs}: it holds {len(whole)} runs of {name} that trained all their "
                "steps; name the folder of one, or drop --runs"
            )
        return whole[0]
    folder = whole_workspace(Path(tempfile.mkdtemp(prefix="orrery-async-")), manifest_here(name))
    for stage in ("init", "rl"):
        argv = [sys.executable, "-m", "orrery.launcher.cli", "run", name, stage]
        if code := subprocess.run(argv, cwd=folder).returncode:
            raise SystemExit(
                f"error: {stage} of {name} ended with code {code}; its logs are in {folder}/runs"
            )
    return RunData.load(next((folder / "runs").glob(f"{name}-????????????")))


def manifest_here(name: str) -> dict[str, Any]:
    """Return a checked-in manifest with the accelerator of this machine."""
    return for_this_machine(checked_in(name))


def checked_in(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"manifests/{name}.json").read_text())


def for_this_machine(run: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with this machine's accelerator. Exit if only one of both is a CPU."""
    here, hardware = this_machine(), run["hardware"]
    if "cpu" in (here.accelerator, hardware["accelerator"]) and (
        here.accelerator != hardware["accelerator"]
    ):
        raise SystemExit(f"error: {run['name']} is for {hardware['accelerator']}, this is {here}")
    return run | {"hardware": hardware | {"accelerator": here.accelerator}}


def ran_with(run: RunData) -> dict[str, Any]:
    """Return versions from the run's receipt, because another machine may have made the run."""
    stages = json.loads((run.run_dir / "receipt.json").read_text())["stages"]
    return (stages.get("rl") or stages["init"])["attempts"][-1]["versions"]


@dataclass(frozen=True)
class Numbers:
    """The figures of a loop after warm-up. `tokens_per_s` counts the trained tokens."""

    tokens_per_s: float
    trainer_waits: float  # share of the time in which trainer.0 waited for a batch
    trainer_busy: float  # share of the whole stage in forward, backward, optimizer
    engines_busy: float  # share of the whole stage in which an engine had a request
    staleness_mean: float
    staleness_max: int
    update_pause_s: float  # mean time that engines pause for new weights
    update_s: float  # mean time from the start of draining until engines resume
    step_s: float
    longest_step_s: float
    median_tokens: float  # median over batches of the mean answer length
    mismatch_kl: (
        float  # mean over steps of the KL between the sampling policy and the trained policy
    )
    num_steps: int
    num_measured: int  # steps after warm-up
    dropped: dict[str, int]  # sampled rollouts that never trained, by reason

    def row(self, variant: str) -> dict[str, Any]:
        rest = {name: value for name, value in vars(self).items() if name != "tokens_per_s"}
        return {
            "variant": variant,
            "value": self.tokens_per_s,
            "unit": "tokens/s",
            "better": "higher",
            "goal": None,
            **rest,
        }


def numbers(run: RunData, most_of_median: float = MOST_OF_MEDIAN) -> Numbers:
    """Return the figures. Raise SystemExit with too few measured steps, or if one compiled.

    Runs with evaluations have slower steps, so they need a larger `most_of_median`.
    """
    steps = [row for row in run.rl[WARM_STEPS:] if row["time_s"] <= run.batches[-1]["time_s"]]
    if len(steps) < 2:
        raise SystemExit(
            f"error: {run.run_dir.name}: of {len(run.rl)} steps {WARM_STEPS} warm up, and "
            f"{len(steps)} more ended before the last batch was cut; 2 are needed to measure "
            "anything: give the run a larger stages.rl.num_steps"
        )
    begin_s, end_s = run.rl[WARM_STEPS - 1]["time_s"], steps[-1]["time_s"]
    lengths = [
        after["time_s"] - before["time_s"]
        for before, after in itertools.pairwise([run.rl[WARM_STEPS - 1], *steps])
    ]
    per_token_s = [
        length / row["num_trained_tokens"] for length, row in zip(lengths, steps, strict=True)
    ]
    slowest = max(range(len(steps)), key=per_token_s.__getitem__)
    if (times := per_token_s[slowest] / statistics.median(per_token_s)) > most_of_median:
        raise SystemExit(
            f"error: {run.run_dir.name}: step {steps[slowest]['step']} took "
            f"{lengths[slowest]:.3g} s, {times:.2g} times the median a token of the {len(steps)} "
            "measured steps, so it compiled or the machine stood still; measure again, with a "
            "larger stages.rl.num_steps where a shape compiles late"
        )
    window: list[Interval] = [(begin_s, end_s)]
    waits = [
        (span.start_s, span.end_s)
        for span in run.spans
        if span.role == "trainer.0" and span.name == "wait"
    ]
    spent = shares(run.spans)
    assert spent is not None
    numbered = {row["step"] for row in steps}
    warm = [row for row in run.batches if row["step"] in numbered]
    updates = [row for row in run.updates if row["version"] in numbered]
    updates = updates or list(run.updates)  # engines may have skipped all measured versions
    means = sorted(row["completion_tokens_mean"] for row in warm)
    return Numbers(
        tokens_per_s=sum(row["num_trained_tokens"] for row in steps) / (end_s - begin_s),
        trainer_waits=overlap_s(waits, window) / (end_s - begin_s),
        trainer_busy=spent.trainer_busy,
        engines_busy=spent.engine_busy,
        staleness_mean=sum(row["staleness_mean"] for row in warm) / len(warm),
        staleness_max=max(row["staleness_max"] for row in warm),
        update_pause_s=sum(row["pause_s"] for row in updates) / len(updates),
        update_s=sum(row["drain_s"] + row["pause_s"] for row in updates) / len(updates),
        step_s=(end_s - begin_s) / len(steps),
        longest_step_s=max(lengths),
        median_tokens=means[len(means) // 2],
        mismatch_kl=sum(row["mismatch_kl"] for row in steps) / len(steps),
        num_steps=len(run.rl),
        num_measured=len(steps),
        dropped=run.batches[-1]["dropped"],
    )
