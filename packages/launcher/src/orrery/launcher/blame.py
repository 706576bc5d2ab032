"""Blame: which other process the error of a failed one names as its cause. A stage's last sentence is then about that one.

An orchestrator hears within a millisecond that an engine is gone. The engine's own server needs a second to notice that its core has died.
"""

import re
from collections.abc import Collection

ACCUSED_S = 5.0  # for the process that an error names to fail too


def accused(error: str | None, names: Collection[str]) -> set[str]:
    """Of the processes `names`, those that `error` names: `trainer.1`, `engine 0` (`inference.0`), `router`."""
    words = set(re.findall(r"\b[a-z_]+\.\d+\b", error or ""))
    words |= {f"inference.{index}" for index in re.findall(r"\bengine (\d+)\b", error or "")}
    words |= {"router.0"} if re.search(r"\brouter\b", error or "") else set()
    return words & set(names)
