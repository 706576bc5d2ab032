"""Score answers in a pool of processes, because some scorers execute answers.

- All processes need the same PYTHONHASHSEED, because some reasoning-gym families order words by
  hash.
- A failed process is replaced. Scoring its answer raises OrreryError, and the answer
  never scores 0.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
from functools import cache, partial
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.runtime.timing import scaled
from orrery.tasks.scorer_process import KINDS, LIMIT_S, MAX_SENTENCE
from orrery.tasks.task import JudgeBroken

log = logging.getLogger(__name__)

NUM_SCORERS = 8
START_S = 120.0  # imports are slow
MAX_LINE_BYTES = 100 + 12 * MAX_SENTENCE
HASH_SEED = "0"
SLACK_S = 5.0  # time to reply after `limit_s`
CANARY_EVERY = 500  # answers between two checks with known answers
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
        # Equal calls share one task, so cancelling one call must not cancel the task.
        return await asyncio.shield(scoring)

    def _forget_failure(self, key: bytes, scoring: "asyncio.Future[float | None]") -> None:
        if scoring.cancelled() or scoring.exception() or scoring.result() is None:
            self._scores.pop(key, None)

    async def score(self, kind: str, request: Any, text: str) -> float | None:
        """Return the finite score of `text`, or None if it cannot be scored.

        Raise OrreryError if the scorer process fails or refuses the request.
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
                how = "stood still" if is_late else "ended, or gave an invalid score,"
                raise OrreryError(
                    f"the process that scores answers {how} while it scored an answer. "
                    "The next answer gets a new process"
                ) from error
            except BaseException:  # the next request must not receive this answer's score
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
                        "may be wrong. Install the packages that the lock names, then run again "
                        "from a checkpoint before that check"
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


@cache  # one warning for each exception
def _warn(note: str) -> None:
    log.warning("the reward function raised %s; such a reply is worth 0", note)


@cache
def _canary(kind: str) -> tuple[Any, str, str]:
    """Return a request, a right and a wrong answer."""
    if kind == "verdict":
        return {"verdict": EXACT, "answer": "1", "row": None}, "1", "2"
    import reasoning_gym  # slow, and only its families need it

    item = reasoning_gym.create_dataset(CANARY, seed=0, size=1)[0]
    return [CANARY, {}, 0, item["question"]], item["answer"], "[]"


class _Scorer:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._wire, theirs = socket.socketpair()
        self._wire.setblocking(False)
        self._number, self._is_ready, self.num_until_canary = 0, False, 0
        command = [sys.executable, "-P", "-m", "orrery.tasks.scorer_process", kind]
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
            raise ValueError(f"no answer to request {self._number}: {number}, {score}")
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
                raise ValueError("too long")
        return line

    def end(self) -> None:
        self.process.kill()
        # Freeing the process's memory may take half a second, so a thread waits.
        threading.Thread(target=self.process.wait, daemon=True).start()
        self._wire.close()


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    python = {"PYTHONPATH": path, "PYTHONHASHSEED": HASH_SEED, "PYTHONDONTWRITEBYTECODE": "1"}
    # Each numpy thread takes some of the limited address space.
    return kept | python | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


SCORERS = ScorerPool()
