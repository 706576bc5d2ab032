"""Compiles the Python files below some folders, the same bytes on every machine; runs in the image, by its Python.

- A .pyc names no time: it counts as valid for ever, which holds in an image, where nothing changes.
- What marshal writes depends on which files the process compiled before (it notes which constants are shared), so files are dealt to a
  fixed number of processes in a fixed order, however many cores there are. Hash seeds are fixed for the same reason.
- A file that does not compile stays as it is: packages hold templates and examples for other Pythons.
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
    """All Python files, in the order of their names."""
    return sorted(
        path for folder in folders for path in Path(folder).rglob("*.py") if path.is_file()
    )


def compile_shard(shard: int, folders: list[str]) -> None:
    for path in sources(folders)[shard::SHARDS]:
        compileall.compile_file(
            path, quiet=2, force=True, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH
        )


def compile_all(folders: list[str]) -> None:
    """Raises CalledProcessError when a process fails, not when a file does not compile."""
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
