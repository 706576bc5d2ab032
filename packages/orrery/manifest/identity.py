"""The id of a run: the sha256 of its canonical JSON.

- Canonical: parsed by the schema, keys sorted, no spaces, ASCII, no NaN. Key order and number
  spelling do not change it.
- A run's folder is `<root>/<name>-<first 12 hex digits>`, so an edited spec is a new run.
"""

import hashlib
import json
from pathlib import Path

from orrery.manifest.check import check
from orrery.manifest.json_file import read_json
from orrery.manifest.schema import Manifest


def load(path: str | Path) -> Manifest:
    """Return the manifest in a JSON file. Raises OrreryError with one sentence."""
    example = "manifests/reverse_text.json, which `orrery render` writes"
    remedy = f"give a rendered manifest, such as {example}"
    return check(read_json(Path(path), remedy), str(path))


def canonical_json(manifest: Manifest) -> bytes:
    """Return the bytes that are hashed."""
    return json.dumps(
        manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode("ascii")


def pretty_json(manifest: Manifest) -> str:
    """Return the text that is checked in: sorted keys, two spaces, a newline at the end."""
    return (
        json.dumps(manifest.model_dump(mode="json"), sort_keys=True, indent=2, allow_nan=False)
        + "\n"
    )


def run_id(manifest: Manifest) -> str:
    """Return 64 hex digits."""
    return hashlib.sha256(canonical_json(manifest)).hexdigest()


def id12(manifest: Manifest) -> str:
    """Return the first 12 hex digits, which folder names carry."""
    return run_id(manifest)[:12]


def run_dir(root: str | Path, manifest: Manifest) -> Path:
    """Return the run's folder under `root` (the `runs` folder). Create nothing."""
    return Path(root) / f"{manifest.name}-{id12(manifest)}"
