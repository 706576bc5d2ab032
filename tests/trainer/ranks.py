"""Fork the ranks of a test: `ranks.py MODULE FOLDER PORT NUM_RANKS`, for `run_script`.

MODULE is imported before the fork, because imports take most of a rank's time. No thread or GPU is
in use then. Output goes to FOLDER/rank_<i>.out and .err. A failed rank or SIGTERM ends all ranks.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

GRACE_S = 5.0  # for others that fail of the same cause to say so


def be(module: ModuleType, words: list[str], rank: int) -> None:
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(
            os.open(
                Path(words[0]) / f"rank_{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            ),
            number,
        )
    sys.argv = [module.__name__, *words, str(rank)]
    module.main()
    sys.stdout.flush()


def main() -> None:
    module, words = importlib.import_module(sys.argv[1]), sys.argv[2:]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=be, args=(module, words, rank), daemon=True)
        for rank in range(int(words[-1]))
    ]
    for rank in ranks:
        rank.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and daemons end with their parent
    left = {rank.sentinel for rank in ranks}
    while left and not any(rank.exitcode for rank in ranks):
        left -= set(wait(left))
        for rank in ranks:
            rank.join(0)
    if left:
        wait(left, GRACE_S)
    for rank in ranks:
        rank.kill()
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
