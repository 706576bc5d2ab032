"""Specs of these tests: small axes and runs under `specs/`, with the repository's `lib/` and lock.

The runs: `words`, `sums`, `words_sparse` (mixture of experts), `words_wide` (two engines),
`words_nodes` (five nodes, one for prefill), `words_seed_1` and `_2`.
"""

import shutil
from pathlib import Path

from orrery.manifest.identity import Workspace, find_workspace

REPOSITORY = find_workspace(Path(__file__).parent)


def checkout(folder: Path) -> Workspace:
    """A checkout with these specs in `folder`, to read and to break."""
    shutil.copytree(Path(__file__).parent / "specs", folder / "jsonnet")
    shutil.copytree(REPOSITORY.root / "jsonnet" / "lib", folder / "jsonnet" / "lib")
    (folder / "locks").mkdir()
    shutil.copy(REPOSITORY.root / "locks" / "cpu.txt", folder / "locks")
    return Workspace(folder)
