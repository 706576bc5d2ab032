"""Test that every published run is planned as its source describes it."""

from pathlib import Path

import pytest

from orrery.manifest.schema import trainer_misfits

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from trainer import published

    return published


def test_published_runs_are_planned_on_the_gpus_of_their_sources(published):
    assert len({run.name for run in published.RUNS}) == len(published.RUNS)
    for run in published.RUNS:
        model, trainer, seconds = published.planned(run)
        gpus = trainer.mesh.world_size
        assert f"{gpus} × {run.accelerator[:4].upper()}" in run.name
        assert run.devices_per_node < gpus and run.source.startswith("https://")
        misfits = list(trainer_misfits(trainer, model, run.accelerator, gpus))
        # Pre-training in bfloat16 has learning rates that reinforcement learning has not.
        assert all(text.startswith("trainer.param_dtype 'bfloat16'") for text in misfits)
        assert seconds["step"] > seconds["dense products"] > 0


def test_a_published_run_is_compared_with_its_plan(published):
    [run] = [one for one in published.RUNS if one.one_node_tokens_per_s == 6667]
    row = published.compared(run)
    assert row["value"] == row["planned_tokens_per_s"] / run.tokens_per_s - 1
    assert row["error_of_ratio_to_one_node"] == pytest.approx(0, abs=published.TOLERANCE)
