"""The sweep of benchmarks/async/sweep.py: its variants, and what it says of one that fails."""

import json
import time
from pathlib import Path

import pytest
import shapes
import sweep

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run():
    return json.loads((ROOT / "manifests/smollm2_problems_seed_1.json").read_text())


def test_variants_differ_in_warm_start_and_rate_alone(run):
    one, other = (sweep.variant(run, *values, 30) for values in ((25, 1e-5), (120, 3e-5)))
    assert (one["name"], other["name"]) == ("sweep_25_1e_05", "sweep_120_3e_05")
    assert one["stages"]["sft"]["num_steps"] == 25 and one["trainer"]["optimizer"]["lr"] == 1e-5
    other["name"], other["stages"]["sft"]["num_steps"] = one["name"], 25
    other["trainer"]["optimizer"]["lr"] = 1e-5
    assert one == other and one["stages"]["rl"]["num_steps"] == 30
    assert run["stages"]["rl"]["num_steps"] == 80  # the given manifest is unchanged


def test_a_variant_that_fails_or_is_late_is_told_and_not_raised(run, tmp_path):
    one = sweep.variant(run, 25, 1e-5, 30)
    one["inference"]["kv_cache_bytes"] = 1  # no sequence fits: init refuses it
    folder = sweep.whole_workspace(tmp_path, one)
    why = sweep.train(folder, time.monotonic() + 120, one["name"])
    assert why is not None and why.startswith("init: ")
    assert sweep.train(folder, time.monotonic(), one["name"]) == "no time was left for init"


def test_a_run_for_gpus_is_refused_on_a_machine_without(run, monkeypatch):
    monkeypatch.setattr("shapes.this_machine", lambda: sweep_machine("cpu"))
    with pytest.raises(SystemExit, match="is for h100, this is"):
        shapes.for_this_machine(run)
    monkeypatch.setattr("shapes.this_machine", lambda: sweep_machine("h200"))
    assert shapes.for_this_machine(run)["hardware"]["accelerator"] == "h200"


def sweep_machine(accelerator):
    from orrery.manifest.machine import Machine

    return Machine(accelerator, accelerator.upper(), 1)
