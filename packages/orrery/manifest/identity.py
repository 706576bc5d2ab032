"""Compute a run's id, and find a checkout of Orrery and its commit."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from orrery.manifest.check import check
from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_json
from orrery.manifest.schema import Manifest

COMMIT = "ORRERY_COMMIT"  # environment variable: the code's commit


def load(path: str | Path) -> Manifest:
    example = "manifests/reverse_text.json, which `orrery render` writes"
    remedy = f"give a rendered manifest, such as {example}"
    return check(read_json(Path(path), remedy), str(path))


def canonical_json(manifest: Manifest) -> bytes:
    return json.dumps(
        manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode("ascii")


def pretty_json(manifest: Manifest) -> str:
    return (
        json.dumps(manifest.model_dump(mode="json"), sort_keys=True, indent=2, allow_nan=False)
        + "\n"
    )


def run_id(manifest: Manifest) -> str:
    return hashlib.sha256(canonical_json(manifest)).hexdigest()


def id12(manifest: Manifest) -> str:
    return run_id(manifest)[:12]


def run_dir(root: str | Path, manifest: Manifest) -> Path:
    return Path(root) / f"{manifest.name}-{id12(manifest)}"


@dataclass(frozen=True)
class Workspace:
    root: Path

    @property
    def library(self) -> tuple[Path, ...]:
        return (self.root / "jsonnet", self.root)

    @property
    def run_files(self) -> list[Path]:
        return sorted((self.root / "jsonnet" / "runs").glob("*.jsonnet"))

    def manifest_path(self, name: str) -> Path:
        return self.root / "manifests" / f"{name}.json"

    def shown(self, path: str | Path) -> str:
        path = Path(path)
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


def find_workspace(start: Path | None = None) -> Workspace:
    """Return the checkout around `start` (default: working directory), or around this file."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if (folder / "jsonnet" / "runs").is_dir():
            return Workspace(folder)
    raise OrreryError(f"{here}: no jsonnet/runs here or above. Change into a checkout of Orrery")


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit(folder: Path, *paths: str) -> str:
    """Return $ORRERY_COMMIT, or the commit of `folder`'s checkout, or "unknown".

    A checkout's commit ends with `-dirty` if tracked files below `paths` have changed.
    """
    if named := os.environ.get(COMMIT):
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
