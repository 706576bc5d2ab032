"""Make `fakes.py` and the simulated engine importable under names of this room."""

import importlib.util
import sys
from pathlib import Path

for _name in ("fakes", "simulated_engine", "engine_stand_in"):
    _spec = importlib.util.spec_from_file_location(
        f"orchestrator_{_name}", Path(__file__).with_name(f"{_name}.py")
    )
    sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])
