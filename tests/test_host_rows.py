"""Scripts for hosts of several GPUs print their plan without a GPU, and check what they measure."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from orrery.manifest.identity import load

ROOT = Path(__file__).parents[1]


@pytest.fixture
def two_sites(monkeypatch):
    for folder in ("benchmarks", "benchmarks/elastic"):
        monkeypatch.syspath_prepend(ROOT / folder)
    import two_sites

    return two_sites


@pytest.mark.parametrize("gpus", [2, 4])
def test_two_sites_print_a_command_for_each_site(gpus):
    command = [sys.executable, "benchmarks/elastic/two_sites.py", "--dry-run", "--gpus", str(gpus)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--name oslo" in shown and "--name lima" in shown
    assert f'"dp_shard": {gpus // 2}' in shown and '"codec": "int8_block"' in shown


def rounds(*digests):
    found = [{"digest": each, "members": ["a", "b"], "weights": [1, 1]} for each in digests]
    return dict(enumerate(found))


def test_sites_with_other_weights_or_too_few_rounds_fail(two_sites):
    same = rounds("a", "b", "c", "d")
    assert two_sites.check_bits(same, same) == 4
    with pytest.raises(SystemExit, match=r"after rounds \[3\]"):
        two_sites.check_bits(same, rounds("a", "b", "c", "e"))
    with pytest.raises(SystemExit, match="2 exchanged rounds"):
        two_sites.check_bits(rounds("a", "b"), rounds("a", "b"))


def test_gradients_compare_on_context_and_expert_parallel_ranks():
    command = [sys.executable, "benchmarks/trainer/context_expert.py", "--dry-run"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert '"cp": 4' in shown and '"ep": 8' in shown and '"num_experts": 32' in shown


@pytest.mark.parametrize(
    "row",
    [
        "glm5_slice",
        "qwen3_30b_a3b_16k",
        "qwen3_30b_a3b_16k_kitchen_sink",
        "qwen3_30b_a3b_16k_cpu_offload",
    ],
)
def test_a_row_of_eight_gpus_fits_its_memory_plan(row):
    command = [sys.executable, "benchmarks/trainer/rows.py", row, "--dry-run", "--gpus", "8"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    peak, total = map(float, shown.rsplit(": ", 1)[1].replace("GiB of", "").split())
    assert 0 < peak < total


@pytest.fixture
def two_nodes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from cluster import two_nodes

    return two_nodes


@pytest.mark.parametrize(("steps", "lost"), [(range(1, 13), 0), ([1, 2, 3, *range(5, 13)], 1)])
def test_steps_that_sft_over_two_nodes_lost_are_counted(two_nodes, tmp_path, steps, lost):
    manifest = load(ROOT / "manifests/two_nodes_sft_cpu.json")
    rows = [{"stage": "sft", "step": step, "loss": 1.0, "attempt": 1} for step in steps]
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/trainer.0.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    assert two_nodes.found("sft", two_nodes.History(tmp_path, manifest)) == {"lost": lost}


def run_of(choice, in_flight, **row):
    return SimpleNamespace(
        run_dir=Path("run"),
        updates=[{"num_in_flight": number} for number in in_flight],
        rl=[{"step": 1, "routes_missing": 2, **row}],
        manifest=SimpleNamespace(trainer=SimpleNamespace(indexer_choice=choice)),
    )


def test_a_wide_engine_must_meet_requests_in_flight_and_return_all_choices(monkeypatch):
    for folder in ("benchmarks", "benchmarks/async", "benchmarks/inference"):
        monkeypatch.syspath_prepend(ROOT / folder)
    import wide

    seen = wide.checked(run_of("replay", [0, 3], choices_missing=1))
    assert (seen["routes_missing"], seen["choices_missing"]) == (2, 1)
    assert (seen["updates_with_requests_in_flight"], seen["updates"]) == (1, 2)
    with pytest.raises(SystemExit, match="no update met requests in flight"):
        wide.checked(run_of("replay", [0, 0], choices_missing=0))
    with pytest.raises(SystemExit, match=r"steps \[1\] replayed none \(choices_missing\)"):
        wide.checked(run_of("replay", [1]))
