import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "inference"))  # network_alone
sys.path.insert(0, str(Path(__file__).parent))  # two_turns
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "faults"))  # listeners

# Threads of OpenMP spin by default while they wait, on cores that other tests and roles need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
