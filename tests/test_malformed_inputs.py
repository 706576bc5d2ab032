"""Damaged specs, manifests and run files (`benchmarks/faults/malformed.py`) end in one sentence."""

import subprocess
import sys
from pathlib import Path

import malformed
import pytest

FAULTS = Path(__file__).parents[1] / "benchmarks" / "faults"


def test_a_damaged_file_ends_in_a_sentence_soon_and_leaves_nothing_half_written():
    argv = [sys.executable, FAULTS / "malformed.py", "--cases", "30", "--seed", "2", "--print"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "told", "seconds", "changed", "fault"),
    [
        (0, "fine", 0.1, [], ""),
        (2, "error: a sentence", 0.1, [], ""),
        (1, "Traceback (most recent call last):\nerror: no", 0.1, [], "traceback"),
        (1, "no sentence", 0.1, [], "traceback"),
        (-11, "", 0.1, [], "traceback"),
        (0, "fine", 6.0, [], "hang"),
        (2, "error: a sentence", 0.1, ["manifests/words.json"], "half-written"),
        (0, "fine", 0.1, ["manifests/.words.json.7.tmp"], "half-written"),
    ],
)
def test_each_kind_of_fault_is_told_from_a_refusal(code, told, seconds, changed, fault):
    assert malformed._fault(code, told, seconds, changed) == fault
