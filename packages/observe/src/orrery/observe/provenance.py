"""What a measurement was made with: releases of packages, and the commit of a checkout."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Python's, and those of the packages among these that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit(folder: Path, *paths: str) -> str:
    """The commit of the checkout that `folder` is in, with `-dirty` where tracked files under `paths` differ; "unknown" outside of one.

    Paths are as git takes them (`:/packages`, `:!*.json`). `ORRERY_COMMIT` says it where the checkout is a copy without history.
    """
    if named := os.environ.get("ORRERY_COMMIT"):
        return named
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if changed else "")


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
    ).stdout.strip()
