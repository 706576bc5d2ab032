import sys
from pathlib import Path

# trainer_cases, also for the processes that tests start.
sys.path.insert(0, str(Path(__file__).resolve().parent))
