"""The benchmarks of kernels run: in small, on whatever device is here."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "kernels"


@pytest.mark.parametrize("name", ["adapters", "experts", "lm_head", "sparse_index", "sparse_mla"])
def test_a_benchmark_runs_to_its_end(name):
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", "--smoke"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
