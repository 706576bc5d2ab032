"""Makes this folder and the scripts of contrib/kubernetes importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "contrib" / "kubernetes")]
