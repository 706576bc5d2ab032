"""Score answers in this process or in forks: `python -m orrery.tasks.scorer_process KIND`.

- In: a line `[number, request, text, limit_s]` per answer.
- Out: an empty line when ready, then `[number, score, note]` per answer. The score is null if the
  scorer fails, a message if the request is invalid. The note is null or the exception of a user's
  reward function.
- This process scores verdicts that only compare text. Other scorers may execute the answer, so they
  run in a fork without secrets, capabilities or writable files.
"""

import gc
import json
import math
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path

from orrery.runtime.process_control import (
    adopt_orphans,
    die_with_parent,
    drop_privileges,
    hide_memory,
)

KINDS = {  # kind -> module:function that makes a scorer
    "reasoning_gym": "orrery.tasks.reasoning_gym:scorer_of",
    "verdict": "orrery.tasks.verdicts:scorer_of",
}
COMPARE_TEXT = ("exact", "pattern", "choice")  # verdicts that never execute an answer
LIMIT_S = 5.0
MEMORY_BYTES = 4 * 2**30
MAX_BYTES = 256
NOTE = b"note "
KEPT_SCORERS = 64  # cached, as answers to one problem arrive together
MAX_SENTENCE = 500


def main() -> None:
    die_with_parent()
    # Ignore Slurm's signals to the process group, because answers must still get scores.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    module, _, function = KINDS[kind := sys.argv[1]].partition(":")
    make = getattr(import_module(module), function)  # after stdout is closed, as imports may print
    _warm_up()
    signal.signal(signal.SIGALRM, _raise_timeout)
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    adopt_orphans()  # lets `_end_children` kill a fork's orphans
    drop_privileges()
    hide_memory()
    gc.freeze()  # keeps a fork's garbage collection from copying pages
    answers.write(b"\n")
    os.dup2(nowhere, 2)
    scorer_of = lru_cache(KEPT_SCORERS)(lambda request: make(json.loads(request)))
    for line in requests:
        number, request, *answer = json.loads(line)
        verdict = request["verdict"]["kind"] if kind == "verdict" else None
        scored = _score(partial(scorer_of, json.dumps(request)), verdict, *answer)
        answers.write(json.dumps([number, *scored]).encode() + b"\n")


def _warm_up() -> None:
    """Fill sympy's caches, to halve the time of each fork."""
    from sympy import expand
    from sympy.parsing.sympy_parser import parse_expr

    for text in ("2*x**2 - 3*x*y + 7", "(1 + 2)*3/4 - 5"):
        parse_expr(text, evaluate=False)
        str(expand(parse_expr(text)))


def _score(
    make: Callable[[], Callable[[str], float]], verdict: str | None, text: str, limit_s: float
) -> tuple[float | str | None, str | None]:
    try:
        scorer = make()
    except Exception as error:
        return f"{error or type(error).__name__}"[:MAX_SENTENCE], None
    if verdict in COMPARE_TEXT:
        return _score_here(scorer, text.strip(), limit_s), None
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            _answer(scorer, text.strip(), limit_s, writer, is_users=verdict == "python")
        finally:
            os._exit(1)
    os.close(writer)
    try:
        output = _read(reader, time.monotonic() + limit_s)
    finally:
        os.close(reader)
        _end_children()
    if output.startswith(NOTE):
        return None, output.removeprefix(NOTE).decode(errors="replace")
    try:
        score = float(output)
    except ValueError:
        return None, None
    return score if math.isfinite(score) else None, None


def _score_here(scorer: Callable[[str], float], text: str, limit_s: float) -> float | None:
    """Return the score, or None if the scorer fails or exceeds `limit_s`."""
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        score = scorer(text)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Exception:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return None
    return score


def _raise_timeout(_signal: int, _frame: object) -> None:
    raise TimeoutError


def _answer(
    scorer: Callable[[str], float], text: str, limit_s: float, writer: int, is_users: bool
) -> None:
    die_with_parent()
    os.dup2(writer, 3)
    os.closerange(4, 1024)
    _limit(resource.RLIMIT_CPU, math.ceil(limit_s + 1.0))
    _limit(resource.RLIMIT_NPROC, 0)
    try:
        score = float(scorer(text))
    except BaseException as error:
        if is_users and isinstance(error, Exception):
            from orrery.tasks.verdicts import told

            os.write(3, NOTE + told(error).encode()[: MAX_BYTES - len(NOTE)])
        return
    os.write(3, repr(score).encode())


def _read(reader: int, until_s: float) -> bytes:
    output = b""
    while len(output) <= MAX_BYTES:
        if not select.select([reader], [], [], max(0.0, until_s - time.monotonic()))[0]:
            return b""
        more = os.read(reader, MAX_BYTES + 1)
        if not more:
            return output
        output += more
    return b""


def _end_children() -> None:
    """Kill the fork and its descendants."""
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for pid in map(int, own.read_text().split()):
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    main()
