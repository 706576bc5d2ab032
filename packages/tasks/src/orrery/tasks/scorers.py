"""Scorers: processes that run the library's scorers, some of which execute answers (`eval`, sympy).

- In: a family of reasoning-gym with its config, the library's seed of a problem, its question, the answer. Out: its score, or None where
  there is none. A process makes the problem again by its seed, and says where that is another one: some families order words by hashes
  that are of a process, which PYTHONHASHSEED settles (roles have it from the launcher).
- A process (`scoring.py`) starts at its first use, which takes seconds, and is kept. There are at
  most NUM_SCORERS, for all tasks. Each scores one answer at a time, in a fork that is then killed.
- Requests are served in order. LIMIT_S, scaled, counts from an answer's turn; then the fork is
  killed.
- OrreryError, never a score of 0: a process cannot start, ends, hangs or replies with no score. The
  next answer gets a new process. An answer can cause this by a signal, but gains nothing by it.
- Canaries: see `_try_canaries`. A wrong score of a known answer ends the run.
- A process ends with this one, even if this one is killed. It inherits no environment and no files.
"""

import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import threading
from functools import cache
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.runtime.timing import scaled
from orrery.tasks.scoring import LIMIT_S, OTHER_PROBLEM
from orrery.tasks.task import JudgeBroken

NUM_SCORERS = 8
START_S = 120.0  # for its imports, on a file system that is slow
MAX_LINE_BYTES = 200  # of a number and a score
HASH_SEED = "0"
SLACK_S = 5.0  # beyond an answer's limit, for the process to kill the fork and reply
CANARY_EVERY = 500
CANARY = "spiral_matrix"  # the library's scorer runs its answers
WRONG = "[]"
INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")


class Scorers:
    def __init__(self, num_scorers: int = NUM_SCORERS, limit_s: float = LIMIT_S):
        self.num_scorers, self.limit_s = num_scorers, limit_s
        self._idle: list[_Scorer] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(
        self, family: str, config: dict[str, Any], seed: int, question: str, text: str
    ) -> float | None:
        """The library's score of `text` as an answer to its problem of `seed`: finite; None where it cannot be scored.

        Raises OrreryError where no process can be started to score it, or none makes this `question`.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # turns are of one loop, processes of none
            self._loop, self._turns = loop, asyncio.Semaphore(self.num_scorers)
        async with self._turns:
            scorer = await self._ready()
            try:
                await self._try_canaries(scorer)
                score = await self._ask(scorer, family, config, seed, question, text)
            except (
                OSError,
                EOFError,
                ValueError,
                TypeError,
            ) as error:  # hangs (TimeoutError), has ended, or replies with no score
                scorer.end()
                how = (
                    "stood still"
                    if isinstance(error, TimeoutError)
                    else "ended, or said what is no score,"
                )
                raise OrreryError(
                    f"the process that scores answers {how} while it scored one; the next answer gets a new one"
                ) from error
            except BaseException:  # nobody waits any more: what it is about to say would be taken for the next answer's score
                scorer.end()
                raise
            self._idle.append(scorer)
        if isinstance(score, str):  # OTHER_PROBLEM
            raise OrreryError(
                f"family {family}: another process makes another problem of seed {seed}; set PYTHONHASHSEED={HASH_SEED}"
            )
        return score

    async def _ask(self, scorer: "_Scorer", *request: Any) -> float | str | None:
        limit_s = scaled(self.limit_s)
        async with asyncio.timeout(limit_s + scaled(SLACK_S)):
            return await scorer.score(*request, limit_s)

    async def _try_canaries(self, scorer: "_Scorer") -> None:
        """Raise JudgeBroken if the process scores a known right or a known wrong answer wrongly.

        Checked at its start and after every CANARY_EVERY answers.
        """
        if scorer.num_until_canary == 0:
            question, right = _canary()
            for text, known in ((right, 1.0), (WRONG, 0.0)):
                score = await self._ask(scorer, CANARY, {}, 0, question, text)
                if score != known:
                    raise JudgeBroken(
                        f"the process that scores answers gave {score} to a known answer to {CANARY!r} that is worth {known:g}; rewards "
                        "since the last such test may be wrong; go back to a checkpoint before it, or see that reasoning-gym is the "
                        "release that the lock names, then run again"
                    )
            scorer.num_until_canary = CANARY_EVERY
        scorer.num_until_canary -= 1

    async def _ready(self) -> "_Scorer":
        while self._idle and self._idle[-1].process.poll() is not None:
            self._idle.pop().end()
        scorer = self._idle.pop() if self._idle else _Scorer()
        try:
            async with asyncio.timeout(scaled(START_S)):
                await scorer.ready()
        except (OSError, EOFError) as error:
            scorer.end()
            why = (
                "it was too slow"
                if isinstance(error, TimeoutError)
                else "what it said of it stands above in this log"
            )
            raise OrreryError(f"the process that scores answers did not start: {why}") from error
        except (
            BaseException
        ):  # nobody waits any more; the next answer's wait goes on where this one's was
            self._idle.append(scorer)
            raise
        return scorer


@cache
def _canary() -> tuple[str, str]:
    """Return the canary's question and its right answer."""
    import reasoning_gym

    item = reasoning_gym.create_dataset(CANARY, seed=0, size=1)[0]
    return item["question"], item["answer"]


class _Scorer:
    """One process, and our end of the socket that is its stdin and stdout."""

    def __init__(self) -> None:
        self._wire, theirs = socket.socketpair()
        self._wire.setblocking(False)
        self._number, self._is_ready, self.num_until_canary = 0, False, 0
        with theirs:
            command = [sys.executable, "-P", "-m", "orrery.tasks.scoring"]
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=_environment()
            )

    async def ready(self) -> None:
        if not self._is_ready:
            await self._line()
            self._is_ready = True

    async def score(self, *request: Any) -> float | str | None:
        self._number += 1
        line = json.dumps([self._number, *request]).encode() + b"\n"
        await asyncio.get_running_loop().sock_sendall(self._wire, line)
        number, score = json.loads(await self._line())
        if number != self._number or not (
            score in (None, OTHER_PROBLEM) or (isinstance(score, float) and math.isfinite(score))
        ):
            raise ValueError(f"no answer to request {self._number}: {number}, {score}")
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
        threading.Thread(
            target=self.process.wait, daemon=True
        ).start()  # the kernel may take half a second to free what it held
        self._wire.close()


def _environment() -> dict[str, str]:
    """What Python needs to find what this process has, and no more; numpy's threads would take address space for every core."""
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    python = {"PYTHONPATH": path, "PYTHONHASHSEED": HASH_SEED, "PYTHONDONTWRITEBYTECODE": "1"}
    return kept | python | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
