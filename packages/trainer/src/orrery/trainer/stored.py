"""What the files of a checkpoint hold: every tensor's shape, and any box of it, whatever ranks and meshes wrote them.

Files are mapped, not read: a box costs what it holds.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.json_file import read_object
from orrery.models.placement import Box, intersection, relative, slices

FORMAT = 1
REMEDY = "remove its step folder to go on from the checkpoint before it"


class CheckpointReader:
    """The trainer's half of a checkpoint (`checkpoint.py` has its files). Raises RunFailed where it is not one."""

    def __init__(self, folder: Path):
        state = read_json(folder / "state.json")
        if state.get("format") != FORMAT:
            raise RunFailed(
                f"{folder}: checkpoint format {state.get('format')}, but {FORMAT} is read here; finish the run with what wrote it"
            )
        self.step: int = state["step"]
        self.world_size: int = state["world_size"]
        self.frozen: frozenset[str] = frozenset(state.get("frozen", ()))
        self.base_sha256: str | None = state.get("base_sha256")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}  # as torch names them
        self._folder = folder
        self._files: dict[int, Any] = {}
        self._pieces: dict[str, list[tuple[int, Box]]] = {}
        for rank in range(self.world_size):
            for name, entry in read_json(folder / f"rank_{rank}.json").items():
                box = tuple((start, stop) for start, stop in entry["box"])
                self._pieces.setdefault(name, []).append((rank, box))
                self.shapes[name], self.dtypes[name] = tuple(entry["shape"]), entry["dtype"]

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Fill `target`, which is the box `box` of tensor `name`, of the dtype in the files."""
        missing = target.numel()
        for rank, piece in self._pieces[name]:
            if not box:  # a scalar has no dimensions to slice
                target.copy_(self.file(rank).get_tensor(name))
                missing = 0
            elif (common := intersection(box, piece)) is not None:
                part = self.file(rank).get_slice(name)[slices(relative(common, piece))]
                target[slices(relative(common, box))].copy_(part)
                missing -= part.numel()
        if missing:
            raise RunFailed(f"{self._folder}: {missing} values of {name} are in no file; {REMEDY}")

    def file(self, rank: int) -> Any:
        if rank not in self._files:
            path = self._folder / f"rank_{rank}.safetensors"
            try:
                self._files[rank] = safe_open(path, framework="pt")
            except (
                Exception
            ) as error:  # safetensors has its own exception; a missing file is an OSError
                raise RunFailed(f"{path}: cannot be read ({error}); {REMEDY}") from error
        return self._files[rank]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a checkpoint's file. Raises RunFailed if there is none."""
    try:
        return read_object(path, REMEDY)
    except OrreryError as error:
        raise RunFailed(str(error)) from error
