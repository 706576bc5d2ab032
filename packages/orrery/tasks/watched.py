"""Call a function for many rows in a fork that ends when one row takes too long.

- The fork has a timer for each row, whose signal kills it. So it also ends in code that does not
  return to Python, such as a power of huge numbers.
- The fork may take MEMORY_BYTES more than this process has, so such a power raises MemoryError.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.runtime.timing import scaled
from orrery.tasks.scorer_process import MEMORY_BYTES

ROW_S = 10.0  # wall time, scaled


class RowFailed(Exception):
    """The fork ended at `row`."""

    def __init__(self, row: int, how: str):
        super().__init__(how)
        self.row = row


def watched(
    check: Callable[[int], Any], rows: Sequence[int], limit_s: float = ROW_S
) -> dict[int, Any]:
    """Return `check`'s results by row, without those that are None. They must be JSON, not text.

    Raise RowFailed for a row that takes longer than `limit_s` or ends the fork, and OrreryError if
    `check` raises it.
    """
    limit_s = scaled(limit_s)
    reader, writer = os.pipe()
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            _serve(check, rows, limit_s, writer)
        finally:
            os._exit(1)
    os.close(writer)
    results = []
    with os.fdopen(reader, "rb") as lines:
        for line in lines:
            results.append(json.loads(line))
    _, status = os.waitpid(pid, 0)
    if results and isinstance(results[-1], str):
        raise OrreryError(results[-1])
    if len(results) < len(rows):
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        how = f"takes more than {limit_s:g} s" if is_late else "ends the process"
        raise RowFailed(rows[len(results)], how)
    return {row: said for row, said in zip(rows, results, strict=True) if said is not None}


def _serve(check: Callable[[int], Any], rows: Sequence[int], limit_s: float, writer: int) -> None:
    """Write each row's result as a line of JSON. An OrreryError's text is the last line."""
    os.dup2(2, 1)  # a user's function may print
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MEMORY_BYTES
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    with os.fdopen(writer, "wb") as lines:
        for row in rows:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            try:
                said = check(row)
            except OrreryError as error:
                said = str(error)
            lines.write(json.dumps(said).encode() + b"\n")
            lines.flush()
            if isinstance(said, str):
                return
        signal.setitimer(signal.ITIMER_REAL, 0)
