"""The folders of specs and manifests in a checkout."""

from dataclasses import dataclass
from pathlib import Path

from orrery.manifest.errors import OrreryError


@dataclass(frozen=True)
class Workspace:
    """A checkout of Orrery: `root` holds `jsonnet/`, `locks/` and `manifests/`."""

    root: Path

    @property
    def library(self) -> tuple[Path, ...]:
        """Return the import folders in order, as in `jsonnet -J jsonnet -J .` at the root."""
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
    """Return the checkout around `start` (default: working directory) or the package."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if (folder / "jsonnet" / "runs").is_dir():
            return Workspace(folder)
    raise OrreryError(f"{here}: no jsonnet/runs here or above; change into a checkout of Orrery")
