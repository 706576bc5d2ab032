"""Make a separate workspace for a run whose manifest a benchmark makes."""

from pathlib import Path

from orrery.manifest.identity import canonical_json, run_dir
from orrery.manifest.schema import Manifest
from record import ROOT


def workspace_with(folder: Path, manifest: Manifest) -> Path:
    """Make the empty `folder` a workspace with this manifest. Return its run directory."""
    for name in ("jsonnet", "locks", "local", "Snakefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "manifests").mkdir()
    (folder / "manifests" / f"{manifest.name}.json").write_bytes(canonical_json(manifest))
    return run_dir(folder / "runs", manifest)
