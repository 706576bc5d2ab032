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
