"""The id of a run: the sha256 of its canonical JSON.

- Canonical: parsed by the schema, keys sorted, no spaces, ASCII, no NaN.
- A run's folder is `<root>/<name>-<first 12 hex digits>`, so an edited spec is a new run.
"""

import hashlib
import json
from pathlib import Path

from orrery.manifest.check import check
from orrery.manifest.json_file import read_json
from orrery.manifest.schema import Manifest


def load(path: str | Path) -> Manifest:
    """Return the manifest in a JSON file. Raise OrreryError for an invalid file."""
    example = "manifests/reverse_text.json, which `orrery render` writes"
    remedy = f"give a rendered manifest, such as {example}"
    return check(read_json(Path(path), remedy), str(path))


def canonical_json(manifest: Manifest) -> bytes:
    """Return the hashed bytes."""
    return json.dumps(
        manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode("ascii")


def pretty_json(manifest: Manifest) -> str:
    """Return the text of a checked-in manifest."""
    return (
        json.dumps(manifest.model_dump(mode="json"), sort_keys=True, indent=2, allow_nan=False)
        + "\n"
    )


def run_id(manifest: Manifest) -> str:
    return hashlib.sha256(canonical_json(manifest)).hexdigest()


def id12(manifest: Manifest) -> str:
    return run_id(manifest)[:12]


def run_dir(root: str | Path, manifest: Manifest) -> Path:
    """Return the run's folder under `root`."""
    return Path(root) / f"{manifest.name}-{id12(manifest)}"
