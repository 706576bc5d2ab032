"""The check of the kills benchmark on a made-up run: it finds lost, repeated and wrong batches."""

import json
from pathlib import Path

import kills
import numpy as np
import pytest

from orrery.runtime.metrics import MetricsFile
from orrery.wire.columns import Columns, write_batch

FILE = Path(__file__).parents[1] / "benchmarks" / "faults" / "kills.py"
NUM_STEPS, RESUMED = 4, 2  # the second attempt resumes from step 2 and repeats step 3


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(kills, "NUM_STEPS", NUM_STEPS)


def digest(attempt: int, version: int) -> str:
    return f"{version} by {1 if version <= RESUMED else attempt}"


def made_up(folder: Path, wrong: str = ""):
    """Write the files of a run killed once, after step 3. `wrong` names a defect."""
    run = object.__new__(kills.KilledRun)
    run.folder, run.what = folder, kills.manifest()
    (folder / "metrics").mkdir(parents=True)
    size, whole = (
        run.what.orchestrator.rollouts_per_batch,
        run.what.orchestrator.algorithm.group_size,
    )
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        trainer, orchestrator = (
            MetricsFile(folder, "rl", role, 0, attempt) for role in ("trainer", "orchestrator")
        )
        for version in (steps[0] - 1, *steps):
            other = wrong == "weights" and (attempt, version) == (2, RESUMED)
            trainer.add_span(
                "publish",
                0.0,
                1.0,
                step=version,
                digest="others" if other else digest(attempt, version),
            )
        for step in steps:
            if wrong == "step" and step == 3:
                continue
            versions = np.full(
                2 * size, step - (0 if wrong == "version" and step == 4 else 1), np.int32
            )
            digests = {str(step - 1): digest(1 if wrong == "digest" else attempt, step - 1)}
            groups = np.arange(size) // whole + (step - 1 - (wrong == "samples" and step == 4)) * (
                size // whole
            )
            number = size - (wrong == "part" and step == 2)
            write_batch(
                folder,
                step,
                [batch(versions, groups)] if number == size else [batch(versions[2:], groups[1:])],
                digests=digests,
            )
            orchestrator.write(step, event="batch", digests=digests)
            found = 1e-3 if wrong == "log-probs" and step == 4 else 1e-6
            row = {
                "loss": 0.1,
                "num_trained_tokens": size,
                "logprob_max_abs_diff_same_weights": found,
            }
            for _ in range(2 if wrong == "again" and step == 4 else 1):
                trainer.write(step, **row)
        trainer.close()
        orchestrator.close()
    return run


def batch(versions: np.ndarray, groups: np.ndarray) -> Columns:
    """Return samples of a prompt token and a sampled token."""
    num = len(groups)
    zeros = np.zeros(num, np.float32)
    return Columns(
        np.arange(0, 2 * num + 1, 2, dtype=np.int64),
        {
            "token_id": np.zeros(2 * num, np.int32),
            "trained": np.tile([False, True], num),
            "logprob": np.zeros(2 * num, np.float32),
            "version": versions,
            "advantage": np.zeros(2 * num, np.float32),
        },
        {
            "temperature": zeros,
            "dispatch_version": np.zeros(num, np.int32),
            "reward": zeros,
            "group_id": groups.astype(np.int64),
            "task_index": np.zeros(num, np.int32),
        },
    )


def test_a_run_that_went_on_after_a_kill_has_everything_once(tmp_path):
    found = kills.checked(made_up(tmp_path))
    assert (
        found["lost"],
        found["twice"],
        found["wrong_versions"],
        found["num_steps_trained_again"],
    ) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("step", "lost"),
        ("part", "lost"),
        ("samples", "twice"),
        ("again", "twice"),
        ("version", "wrong_versions"),
        ("digest", "wrong_versions"),
        ("weights", "wrong_versions"),
        ("log-probs", "wrong_versions"),
    ],
)
def test_what_is_wrong_after_a_kill_is_counted(tmp_path, wrong, what):
    assert kills.checked(made_up(tmp_path, wrong))[what] > 0


@pytest.mark.parametrize(
    ("victim", "sentence", "named"),
    [
        (
            "trainer.1",
            "error: rl: trainer.1 was killed by SIGKILL while training (step 5); "
            "its log is L; type `make demo` to go on",
            True,
        ),
        (
            "trainer.1",
            "error: rl: trainer.0 ended with exit code 1 while training (step 5); "
            "its log is L; type `make demo` to go on",
            False,
        ),
        ("trainer.1", "error: rl: trainer.1 was killed by SIGKILL while training (step 5)", False),
        (
            "engine core of inference.0",
            "rl: orchestrator.0 ended with exit code 1: engine 0 is gone; "
            "type `make demo` to go on",
            False,
        ),
        (
            "launcher",
            "the launcher (pid 7) ended without a message; type `make demo` to go on",
            True,
        ),
    ],
)
def test_an_end_is_named_only_where_the_victim_is_and_what_to_type(victim, sentence, named):
    assert kills.is_named(victim, sentence) == named


def test_a_seed_draws_the_same_kills_of_all_roles_each_time():
    drawn = kills.schedule(0, 20)
    assert drawn == kills.schedule(0, 20) != kills.schedule(1, 20)
    roles = {kill.victim.split(".")[0] for kill in drawn}
    assert roles == {
        "trainer",
        "orchestrator",
        "inference",
        "router",
        "launcher",
        "report",
        "engine core of inference",
        "vllm-router of router",
    }
    assert [kills.STAGES.index(kill.stage) for kill in drawn] == sorted(
        kills.STAGES.index(kill.stage) for kill in drawn
    )


def test_the_recorded_figure_is_of_20_kills():
    recorded = json.loads(FILE.with_suffix(".json").read_text())
    assert recorded["details"]["num_kills"] == 20 and recorded["value"] == 0
    assert recorded["details"]["slowest_named_s"] <= kills.NAMED_S
