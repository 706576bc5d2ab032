"""Scripts for hosts of several GPUs print their plan without a GPU, and check what they measure."""

import subprocess
import sys
from pathlib import Path

import pytest

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
