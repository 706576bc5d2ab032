"""Read nvidia-smi, once or repeatedly."""

import subprocess
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def smi(*query: str) -> list[list[str]]:
    """Return the fields of each line of nvidia-smi's answer. Raise as `subprocess.run` does."""
    argv = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return [[word.strip() for word in line.split(",")] for line in text.splitlines() if line]


@contextmanager
def peaks(sample: Callable[[], dict[Key, int]], interval_s: float) -> Iterator[dict[Key, int]]:
    """Call `sample` until the block ends or `sample` raises. Yield each key's highest value."""
    most: dict[Key, int] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(interval_s):
            try:
                values = sample()
            except (OSError, subprocess.CalledProcessError):
                return
            most.update({key: max(most.get(key, 0), value) for key, value in values.items()})

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()
