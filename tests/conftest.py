import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "inference"))  # network_alone
sys.path.insert(0, str(Path(__file__).parent))  # two_turns
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "faults"))  # listeners
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # workspace

# By default waiting OpenMP threads spin, and take cores from other tests and roles.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
