"""Root cause: what an engine that did not start says of it in its log, where vLLM's server says only that some process below it failed.

- An exception is a line that is a name, or a name and `: text`. With vLLM's name of the process before it, alone or with ERROR, any dotted
  name that follows an indented line of that process, as at the end of a traceback; else a name that ends in Error or Exception.
- The cause is the first of them that is no consequence of another process, of those logged as ERROR where there are such; one that was
  being handled when a further one arose comes second, and a consequence last. One that points to another is none.
"""

import os
import re
from pathlib import Path

POINTER = "root cause"  # vLLM's sentences that tell no cause: "See root cause above.", "See stack trace for root cause."
HANDLED = "During handling of the above exception, another exception occurred:"
END_BYTES = 1 << 18  # stacks of an engine core and eight workers, each written twice
PREFIX = re.compile(r"((?:\([^()]* pid=\d+\) )+)(ERROR \S+ \S+ \[\S+\] )?")
EXCEPTION = re.compile(r"([\w.]+)(?:: \S.*)?")
CONSEQUENCE = re.compile(  # what another process's end looks like: a connection, a queue or a call that ended
    r"(?:DistNetwork|Cancelled|EOF|BrokenPipe|ConnectionReset)Error|KeyboardInterrupt|SystemExit|: cancelled$"
    r"|Connection (?:closed|reset) by peer|remote process exit"
)


def root_cause(error: Exception, log: Path, begin: int) -> str:
    """The cause that `log` has after its first `begin` bytes; where it has none, or `error` points to none, what `error` says."""
    if POINTER not in str(error):
        return str(error)
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return str(error)
    said: list[
        tuple[int, bool, str]
    ] = []  # how far each is from a cause, whether it is not logged as an error, and what it says
    in_stack: dict[str, bool] = {}  # by process
    for line in lines:
        prefix = PREFIX.match(line)
        process, text = (prefix[1], line[prefix.end() :]) if prefix else ("", line)
        found = EXCEPTION.fullmatch(text.rstrip())
        if found and (
            found[1].endswith(("Error", "Exception"))
            or ("." in found[1] and process and in_stack.get(process))
        ):
            said.append(
                (2 if CONSEQUENCE.search(found[0]) else 0, not (prefix and prefix[2]), found[0])
            )
        elif text == HANDLED and said:
            said[-1] = max(1, said[-1][0]), *said[-1][1:]
        in_stack[process] = text.startswith(" ")
    causes = [one for one in said if POINTER not in one[2]]
    return min(causes, key=lambda one: one[:2])[2] if causes else str(error)
