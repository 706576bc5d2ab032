"""The id of a run (the sha256 of its canonical JSON), and the folders of a checkout.

- Canonical JSON is the parsed manifest in ASCII, with sorted keys, without spaces or NaN.
- A run's folder is `<root>/<name>-<first 12 hex digits of the id>`, so an edited spec is a new run.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from orrery.manifest.check import check
from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_json
from orrery.manifest.schema import Manifest


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
    """A checkout of Orrery: `root` holds `jsonnet/`, `locks/` and `manifests/`."""

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
    """Return the checkout around `start` (default: working directory), else around this file."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if (folder / "jsonnet" / "runs").is_dir():
            return Workspace(folder)
    raise OrreryError(f"{here}: no jsonnet/runs here or above. Change into a checkout of Orrery")
