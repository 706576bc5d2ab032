"""Score answers in a pool of processes, because some scorers execute answers.

- `python -m orrery.tasks.scorer_pool KIND` is a scorer process. It writes an empty line when ready.
  Then it reads a line `[number, request, text, limit_s]` and writes `[number, score, note]` per
  answer. The score is null if the scorer fails, or a message if the request is invalid. The note
  is null or the exception of a user's reward function.
- All processes share one PYTHONHASHSEED, because some reasoning-gym families order words by hash.
- A failed process is replaced. Its answer raises OrreryError instead of scoring 0.
"""

import asyncio
import gc
import hashlib
import json
import logging
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache, lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.runtime.process_control import (
    adopt_orphans,
    die_with_parent,
    drop_privileges,
    hide_memory,
)
from orrery.runtime.timing import scaled
from orrery.tasks.task import JudgeBroken

log = logging.getLogger(__name__)

KINDS = {  # kind: module:function that makes the scorer
    "reasoning_gym": "orrery.tasks.reasoning_gym:scorer_of",
    "verdict": "orrery.tasks.verdicts:scorer_of",
}
COMPARE_TEXT = ("exact", "pattern", "choice")  # verdicts that never execute an answer
LIMIT_S = 5.0
MEMORY_BYTES = 4 * 2**30
MAX_BYTES = 256
NOTE = b"note "
KEPT_SCORERS = 64  # answers to one problem arrive together
MAX_SENTENCE = 500
NUM_SCORERS = 8
START_S = 120.0  # imports are slow
MAX_LINE_BYTES = 100 + 12 * MAX_SENTENCE
HASH_SEED = "0"
SLACK_S = 5.0  # extra time to reply after `limit_s`
CANARY_EVERY = 500  # answers between two canaries (test answers)
KEPT_SCORES = 10_000
CANARY = "spiral_matrix"  # reasoning-gym family whose scorer executes answers
EXACT = {"kind": "exact", "ignore_case": False, "pattern": None}
INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")


class ScorerPool:
    def __init__(self, num_scorers: int = NUM_SCORERS, limit_s: float = LIMIT_S):
        self.num_scorers, self.limit_s = num_scorers, limit_s
        self._idle: dict[str, list[_Scorer]] = {kind: [] for kind in KINDS}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scores: dict[bytes, asyncio.Future[float | None]] = {}

    async def score_once(self, kind: str, request: Any, text: str) -> float | None:
        """Return `score(kind, request, text)`, cached unless it is None."""
        content = json.dumps([kind, request, text]).encode()
        key = hashlib.blake2b(content, digest_size=16).digest()
        scoring = self._scores.get(key)
        if scoring is None:
            scoring = self._scores[key] = asyncio.ensure_future(self.score(kind, request, text))
            scoring.add_done_callback(partial(self._forget_failure, key))
            if len(self._scores) > KEPT_SCORES:
                del self._scores[next(iter(self._scores))]
        if scoring.done():
            return scoring.result()
        # Equal calls share one asyncio task, so a cancelled call must not cancel it.
        return await asyncio.shield(scoring)

    def _forget_failure(self, key: bytes, scoring: "asyncio.Future[float | None]") -> None:
        if scoring.cancelled() or scoring.exception() or scoring.result() is None:
            self._scores.pop(key, None)

    async def score(self, kind: str, request: Any, text: str) -> float | None:
        """Return the finite score of `text`, or None if the scorer fails.

        Raise OrreryError if the process fails or refuses the request.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a semaphore belongs to one event loop
            self._loop, self._turns = loop, asyncio.Semaphore(self.num_scorers)
        async with self._turns:
            scorer = await self._ready(kind)
            try:
                await self._try_canaries(scorer)
                score = await self._ask(scorer, request, text)
            except (OSError, EOFError, ValueError, TypeError) as error:
                scorer.end()
                is_late = isinstance(error, TimeoutError)
                how = "timed out" if is_late else "ended, or gave an invalid score"
                raise OrreryError(
                    f"the process that scores answers {how}. The next answer gets a new process"
                ) from error
            except BaseException:  # the next request must not receive this score
                scorer.end()
                raise
            self._idle[kind].append(scorer)
        if isinstance(score, str):
            raise OrreryError(score)
        return score

    async def _ask(self, scorer: "_Scorer", request: Any, text: str) -> float | str | None:
        limit_s = scaled(self.limit_s)
        async with asyncio.timeout(limit_s + scaled(SLACK_S)):
            return await scorer.score(request, text, limit_s)

    async def _try_canaries(self, scorer: "_Scorer") -> None:
        """If due, score a right and a wrong answer. Raise JudgeBroken if a score is wrong."""
        if scorer.num_until_canary == 0:
            request, right, wrong = _canary(scorer.kind)
            for text, known in ((right, 1.0), (wrong, 0.0)):
                score = await self._ask(scorer, request, text)
                if score != known:
                    raise JudgeBroken(
                        f"the process that scores answers of kind {scorer.kind} gave {score} to a "
                        f"known answer that is worth {known:g}. Rewards since the last such check "
                        "may be wrong. Install the lock's packages, then resume from a checkpoint "
                        "before that check"
                    )
            scorer.num_until_canary = CANARY_EVERY
        scorer.num_until_canary -= 1

    async def _ready(self, kind: str) -> "_Scorer":
        idle = self._idle[kind]
        while idle and idle[-1].process.poll() is not None:
            idle.pop().end()
        scorer = idle.pop() if idle else _Scorer(kind)
        try:
            async with asyncio.timeout(scaled(START_S)):
                await scorer.ready()
        except (OSError, EOFError) as error:
            scorer.end()
            why = "its error is above in this log"
            if isinstance(error, TimeoutError):
                why = "it was too slow"
            raise OrreryError(f"the process that scores answers did not start: {why}") from error
        except BaseException:
            idle.append(scorer)
            raise
        return scorer


@cache  # warn once per exception
def _warn(note: str) -> None:
    log.warning("the reward function raised %s; such a reply is worth 0", note)


@cache
def _canary(kind: str) -> tuple[Any, str, str]:
    """Return (request, right answer, wrong answer)."""
    if kind == "verdict":
        return {"verdict": EXACT, "answer": "1", "row": None}, "1", "2"
    import reasoning_gym

    item = reasoning_gym.create_dataset(CANARY, seed=0, size=1)[0]
    return [CANARY, {}, 0, item["question"]], item["answer"], "[]"


class _Scorer:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._wire, theirs = socket.socketpair()
        self._wire.setblocking(False)
        self._number, self._is_ready, self.num_until_canary = 0, False, 0
        command = [sys.executable, "-P", "-m", "orrery.tasks.scorer_pool", kind]
        with theirs:
            number = theirs.fileno()
            self.process = subprocess.Popen(
                command, stdin=number, stdout=number, env=_environment()
            )

    async def ready(self) -> None:
        if not self._is_ready:
            await self._line()
            self._is_ready = True

    async def score(self, *request: Any) -> float | str | None:
        self._number += 1
        line = json.dumps([self._number, *request]).encode() + b"\n"
        await asyncio.get_running_loop().sock_sendall(self._wire, line)
        number, score, note = json.loads(await self._line())
        is_score = isinstance(score, float) and math.isfinite(score)
        if number != self._number or not (is_score or score is None or isinstance(score, str)):
            raise ValueError(f"request {self._number} got answer {number} with score {score}")
        if note is not None:
            _warn(note)
        return score

    async def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            more = await asyncio.get_running_loop().sock_recv(self._wire, MAX_LINE_BYTES)
            line += more
            if not more:
                raise EOFError
            if len(line) > MAX_LINE_BYTES:
                raise ValueError("the line is too long")
        return line

    def end(self) -> None:
        self.process.kill()
        # Wait in a thread, because freeing the process's memory takes time.
        threading.Thread(target=self.process.wait, daemon=True).start()
        self._wire.close()


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    python = {"PYTHONPATH": path, "PYTHONHASHSEED": HASH_SEED, "PYTHONDONTWRITEBYTECODE": "1"}
    # Each numpy thread uses up limited address space.
    return kept | python | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


SCORERS = ScorerPool()


# The rest of this module runs in a scorer process.


def main() -> None:
    die_with_parent()
    # Ignore Slurm's signals to the process group, to finish answers.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    module, _, function = KINDS[kind := sys.argv[1]].partition(":")
    make = getattr(import_module(module), function)  # imports may print, so stdout is redirected
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
    """Fill sympy's caches, to speed up forks."""
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
