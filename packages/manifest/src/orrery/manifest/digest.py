"""The sha256 of files: what a manifest names weights and tokenizers by, and what a shell computes too."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def sha256_of(files: Sequence[Path]) -> str:
    """Of one file its sha256; of several that of the lines "sha256  name" in the order of their names (`sha256sum FILES | sha256sum`)."""
    files = sorted(files, key=lambda path: path.name)
    with ThreadPoolExecutor(
        min(len(files), len(os.sched_getaffinity(0)))
    ) as pool:  # hashing lets other threads run
        digests = list(pool.map(sha256, files))
    if len(files) == 1:
        return digests[0]
    lines = "".join(f"{digest}  {path.name}\n" for digest, path in zip(digests, files, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def sha256(path: Path) -> str:
    """Of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
