"""Makes `fakes.py` importable as `orchestrator_fakes`: other rooms have fakes of their own, and one test run loads them all."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("orchestrator_fakes", Path(__file__).with_name("fakes.py"))
sys.modules["orchestrator_fakes"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["orchestrator_fakes"])
