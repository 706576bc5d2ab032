"""The sha256 of files, as manifests name weights and tokenizers."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def sha256_of(files: Sequence[Path]) -> str:
    """Return the sha256 of one file, or the sha256 of the lines "sha256  name" of several.

    The shell equivalent is `sha256sum FILES | sha256sum`, with files sorted by name.
    """
    files = sorted(files, key=lambda path: path.name)
    with ThreadPoolExecutor(min(len(files), len(os.sched_getaffinity(0)))) as pool:
        digests = list(pool.map(sha256, files))
    if len(files) == 1:
        return digests[0]
    lines = "".join(f"{digest}  {path.name}\n" for digest, path in zip(digests, files, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
