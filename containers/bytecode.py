"""Compile the Python files of an image to the same bytes on every machine. Runs in the image.

- A .pyc file carries no time stamp and counts as valid for ever, because an image does not change.
- marshal's output depends on the files that the process compiled before. A fixed number of
  processes therefore compiles the files in a fixed order, whatever the number of cores.
- A file that does not compile stays without bytecode. Packages hold templates for other Pythons.
"""

import compileall
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from py_compile import PycInvalidationMode

SHARDS = 16


def sources(folders: list[str]) -> list[Path]:
    """Return all Python files, sorted by path."""
    return sorted(
        path for folder in folders for path in Path(folder).rglob("*.py") if path.is_file()
    )


def compile_shard(shard: int, folders: list[str]) -> None:
    for path in sources(folders)[shard::SHARDS]:
        compileall.compile_file(
            path, quiet=2, force=True, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH
        )


def compile_all(folders: list[str]) -> None:
    """Raise CalledProcessError if a process fails. A file that does not compile is no failure."""
    argv = [sys.executable, "-S", "-P", "-W", "ignore", __file__]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(
                subprocess.run,
                [*argv, str(shard), *folders],
                check=True,
                env={"PYTHONHASHSEED": "0"},
            )
            for shard in range(SHARDS)
        ]
        for job in jobs:
            job.result()


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        compile_shard(int(sys.argv[1]), sys.argv[2:])
    else:
        compile_all(sys.argv[1:])
