"""Blame: find the process that the error of a failed process names as its cause.

A stage's last sentence is then about the named process. An orchestrator notices within a
millisecond that an engine is gone, but the engine's server needs a second to notice that its core
has died.
"""

import re
from collections.abc import Collection

ACCUSED_S = 5.0  # time in which the process that an error names must fail too


def accused(error: str | None, names: Collection[str]) -> set[str]:
    """Return the processes in `names` that `error` mentions.

    It may say `trainer.1`, `engine 0` (`inference.0`) or `router` (`router.0`).
    """
    words = set(re.findall(r"\b[a-z_]+\.\d+\b", error or ""))
    words |= {f"inference.{index}" for index in re.findall(r"\bengine (\d+)\b", error or "")}
    words |= {"router.0"} if re.search(r"\brouter\b", error or "") else set()
    return words & set(names)
