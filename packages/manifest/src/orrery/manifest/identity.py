"""Identity: the name of a run's result is the hash of what determines it.

- The id is the sha256 of canonical JSON, never of Jsonnet's text or of the pretty file: key order and number spelling do not move it.
- Canonical: parsed by the schema, keys sorted, no spaces, ASCII, no NaN.
- A run's folder is `<root>/<name>-<first 12 hex digits>`: an edited spec makes a new run beside the old one.
"""

import hashlib
import json
from pathlib import Path

from orrery.manifest.check import check
from orrery.manifest.json_file import read_json
from orrery.manifest.schema import Manifest


def load(path: str | Path) -> Manifest:
    """The manifest in a JSON file; raises `OrreryError` with one sentence."""
    remedy = "give a rendered manifest, such as manifests/reverse_text.json, which `orrery render` writes"
    return check(read_json(Path(path), remedy), str(path))


def canonical_json(manifest: Manifest) -> bytes:
    """The bytes that the id is the hash of."""
    return json.dumps(
        manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode("ascii")


def pretty_json(manifest: Manifest) -> str:
    """The text that is checked in: sorted keys, two spaces, a newline at the end."""
    return (
        json.dumps(manifest.model_dump(mode="json"), sort_keys=True, indent=2, allow_nan=False)
        + "\n"
    )


def run_id(manifest: Manifest) -> str:
    """64 hex digits."""
    return hashlib.sha256(canonical_json(manifest)).hexdigest()


def id12(manifest: Manifest) -> str:
    """The first 12 hex digits of the id: what folder names carry."""
    return run_id(manifest)[:12]


def run_dir(root: str | Path, manifest: Manifest) -> Path:
    """Where the run lives under `root` (the `runs` folder); nothing is created."""
    return Path(root) / f"{manifest.name}-{id12(manifest)}"
