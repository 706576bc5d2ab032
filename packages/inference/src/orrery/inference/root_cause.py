"""Root cause: what an engine that did not start says of it in its log, where vLLM's server says only that some process below it failed."""

import os
import re
from pathlib import Path

POINTER = "root cause"  # vLLM's sentences that tell no cause: "See root cause above.", "See stack trace for root cause."
END_BYTES = 1 << 18  # stacks of an engine core and eight workers, each written twice
EXCEPTION = re.compile(r"(?:\(.*? pid=\d+\) ERROR \S+ \S+ \[\S+\] )?((?:\w+\.)*\w*(?:Error|Exception): \S.*)")


def root_cause(error: Exception, log: Path, begin: int) -> str:
    """The last exception in `log` after its first `begin` bytes that points to no other; where there is none, or `error` points to
    none, what `error` says."""
    if POINTER not in str(error):
        return str(error)
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return str(error)
    said = [found[1].strip() for line in lines if (found := EXCEPTION.fullmatch(line)) and POINTER not in line]
    return said[-1] if said else str(error)
