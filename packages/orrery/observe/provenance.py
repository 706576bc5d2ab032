"""The versions of packages and the commit of a checkout, for records of measurements."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit(folder: Path, *paths: str) -> str:
    """Return the commit of the checkout around `folder`, or "unknown".

    Add `-dirty` if tracked files under the git `paths` differ. ORRERY_COMMIT names the commit of a
    copy without history.
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
