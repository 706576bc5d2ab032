"""Start the ranks of a test: `ranks.py MODULE FOLDER PORT NUM_RANKS`, for `run_script`.

On a CPU the ranks are forks, made after the import of MODULE, because imports take most of a rank's
time. On GPUs each rank is a new interpreter: a fork cannot use CUDA that an import has initialised.
Output goes to FOLDER/rank_<i>.out and .err. A failed rank or SIGTERM ends all ranks.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import wait
from pathlib import Path

GRACE_S = 5.0  # for other ranks that fail for the same cause to print their error


def be(name: str, words: list[str], rank: int) -> None:
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(
            os.open(
                Path(words[0]) / f"rank_{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            ),
            number,
        )
    sys.argv = [name, *words, str(rank)]
    importlib.import_module(name).main()
    sys.stdout.flush()


def main() -> None:
    name, words = sys.argv[1], sys.argv[2:]
    on_cpu = os.environ.get("TRAINER_TEST_DEVICE", "cpu") == "cpu"
    if on_cpu:
        importlib.import_module(name)
    context = multiprocessing.get_context("fork" if on_cpu else "spawn")
    ranks = [
        context.Process(target=be, args=(name, words, rank), daemon=True)
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
