"""`python -m orrery.tasks.scoring`: scores answers of reasoning-gym, one JSON line each; `scorers.py` starts it and says when it ends.

- In, on stdin: `[number, family, config, seed, question, text]`. Out, on stdout: an empty line once it is ready, then `[number, score]`
  for each; the score is null where the library's scorer raises, or exits, or gives no finite number, and OTHER_PROBLEM where the seed's
  question is another one here.
- What the scorer prints goes nowhere. Its folder is empty, and removed; it has MEMORY_BYTES of address space, LIMIT_S (and a little) of
  processor time an answer, and files that it writes stay empty.
- Ends with who started it: at the end of its stdin, and by the kernel where it is scoring just then.
"""

import json
import math
import os
import resource
import signal
import tempfile
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from orrery.observe.lifeline import die_with_parent

if TYPE_CHECKING:
    from orrery.tasks.reasoning_gym import Family

OTHER_PROBLEM = "other problem"
LIMIT_S = 5.0  # of an answer; the library's scorers take milliseconds
MEMORY_BYTES = 4 * 2**30


def main() -> None:
    die_with_parent()
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # Slurm sends them to the whole group; an answer would seem to end us
        signal.signal(one, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    import orrery.tasks.reasoning_gym  # noqa: F401 (a library that prints as it is imported does not print an answer)

    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    for what, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    answers.write(b"\n")
    os.dup2(nowhere, 2)  # until here a reason not to start is told
    for line in requests:
        number, *request = json.loads(line)
        _allow_processor_s(LIMIT_S + 1.0)
        answers.write(json.dumps([number, _score(*request)]).encode() + b"\n")


def _score(name: str, config: dict[str, Any], seed: int, question: str, text: str) -> float | str | None:
    """Runs what the policy wrote."""
    from reasoning_gym.utils import extract_answer

    try:
        dataset, text = _family(name, json.dumps(config)).dataset(seed), text.strip()
        item = dataset[0]
        if item["question"] != question:
            return OTHER_PROBLEM
        score = float(dataset.score_answer(extract_answer(text) or text, item))
        return score if math.isfinite(score) else None
    except BaseException:  # the boundary to scorers that run free text: it may raise anything, and exit
        return None


@cache
def _family(name: str, config: str) -> "Family":
    from orrery.tasks.reasoning_gym import Family

    return Family(name, json.loads(config))


def _allow_processor_s(more_s: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = math.ceil(time.process_time() + more_s)
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
