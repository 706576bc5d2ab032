"""Make a separate workspace for a run whose manifest a benchmark makes."""

import json
from pathlib import Path
from typing import Any

from orrery.manifest.identity import canonical_json, run_dir
from orrery.manifest.schema import Manifest

ROOT = Path(__file__).resolve().parents[1]
ONE_THREAD = '[environment]\nOMP_NUM_THREADS = "1"\n'  # site.toml of sites that share cores
PIPELINE = ("jsonnet", "locks", "local", "Snakefile")


def linked(folder: Path, *names: str) -> Path:
    """Create `folder` with links to these names of the checkout, and return it.

    The default is PIPELINE and manifests.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or (*PIPELINE, "manifests"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def workspace_with(folder: Path, manifest: Manifest) -> Path:
    """Make the empty `folder` a workspace with this manifest. Return its run directory."""
    linked(folder, *PIPELINE)
    (folder / "manifests").mkdir()
    (folder / "manifests" / f"{manifest.name}.json").write_bytes(canonical_json(manifest))
    return run_dir(folder / "runs", manifest)


def whole_workspace(folder: Path, *manifests: dict[str, Any]) -> Path:
    """Link the checkout into `folder`, with these manifests and no runs. Return `folder`."""
    names = (each.name for each in ROOT.iterdir() if not each.name.startswith("."))
    linked(folder, *(name for name in names if name not in ("manifests", "runs")))
    (folder / "manifests").mkdir()
    for manifest in manifests:
        (folder / f"manifests/{manifest['name']}.json").write_text(json.dumps(manifest))
    return folder
