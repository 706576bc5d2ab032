"""Read the trainer's part of a checkpoint, at any world size and mesh.

    checkpoints/step_<n>.attempt_<k>/trainer/
        state.json            {"format", "step", "world_size", "frozen", "base_sha256"}
        rank_<i>.json         {name: {"shape", "dtype", "box"}}, box: [start, stop) per dimension
        rank_<i>.safetensors  values in these boxes, RNG state
        rank_<i>.sha256.json  size and sha256 of both files
        published.json        {policy version: digest} (`publish.py`)

Tensors are named `weight/<parameter>`, `bias/<buffer>`, or `<key>/<parameter>` (optimizer state).
Orrery does not use `torch.distributed.checkpoint`, because it stores pickles.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.json_file import read_object
from orrery.manifest.publish import sha256
from orrery.models.hf_folder import weight_files
from orrery.models.placement import Box, intersection, local_box, local_tensor, relative, slices
from orrery.runtime.run_directory import inputs_path
from orrery.trainer.heartbeat import mark_part
from orrery.trainer.learner import Learner
from orrery.trainer.optim import named_state
from orrery.trainer.parallel.world import World

FORMAT = 1
REMEDY = "remove its step folder to go on from the checkpoint before it"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class StateTensor:
    """A rank's shard: the region `box` of a tensor of `shape`."""

    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    writes: bool  # False if another rank writes the same box


def state_of(learner: Learner) -> dict[str, StateTensor]:
    state = {}
    for name, weight in learner.weights.items():
        local, writes = local_tensor(weight).detach(), _is_first_copy(weight, learner.world)
        state[f"weight/{name}"] = StateTensor(tuple(weight.shape), local_box(weight), local, writes)
    for key, name, local, box in named_state(learner.optimizer, learner.weights):
        trained = state[f"weight/{name}"]
        shape, writes = (trained.shape, trained.writes) if box else ((), learner.world.is_first)
        state[f"{key}/{name}"] = StateTensor(shape, box, local, writes)
    for name, bias in learner.expert_load.biases.items():
        whole = tuple((0, size) for size in bias.shape)
        state[f"bias/{name}"] = StateTensor(tuple(bias.shape), whole, bias, learner.world.is_first)
    outer = {"outer_momentum": learner.outer_momentum, "outer_start": learner.outer_start}
    for key, tensors in outer.items():
        for name, local in tensors.items():
            state[f"{key}/{name}"] = replace(state[f"weight/{name}"], local=local)
    return state


def _frozen_names(learner: Learner) -> frozenset[str]:
    parameters = learner.policy.named_parameters()
    return frozenset(name for name, weight in parameters if not weight.requires_grad)


def base_sha256(run_dir: Path, stage: str, start: Path) -> str:
    """Return one sha256 over all weight files in `start`."""
    file = inputs_path(run_dir, stage)
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    digest = hashlib.sha256()
    for path in sorted(weight_files(start)):
        name = path.relative_to(run_dir).as_posix() if path.is_relative_to(run_dir) else path.name
        digest.update(f"{known.get(name) or sha256(path)}  {path.name}\n".encode())
    return digest.hexdigest()


def state_header(learner: Learner) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": learner.step,
        "world_size": learner.world.size,
        "frozen": sorted(_frozen_names(learner)),
        "base_sha256": learner.base_sha256,
    }


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_rng(file: Any, device: torch.device) -> None:
    torch.set_rng_state(file.get_tensor("rng/cpu"))
    if device.type == "cuda" and "rng/cuda" in file.keys():  # noqa: SIM118
        torch.cuda.set_rng_state(file.get_tensor("rng/cuda"), device)


def _is_first_copy(weight: torch.Tensor, world: World) -> bool:
    if not isinstance(weight, DTensor):
        return world.is_first
    coordinate = weight.device_mesh.get_coordinate()
    if coordinate is None or world.replica:
        return False
    placed = zip(coordinate, weight.placements, strict=True)
    return not any(index for index, placement in placed if placement.is_replicate())


def load(learner: Learner, folder: Path) -> None:
    """Load a checkpoint. Raise RunFailed if it is unreadable or belongs to another model.

    Restore RNG state only if the world size equals the checkpoint's.
    """
    stored, state = CheckpointReader(folder), state_of(learner)
    _check_fits(stored, state, learner, folder)
    with torch.no_grad():
        for name, tensor in state.items():
            stored.read(name, tensor.box, tensor.local)
            mark_part()
    if stored.world_size == learner.world.size:
        _restore_rng(stored.file(learner.world.rank), learner.world.device)
    learner.step = stored.step


def _check_fits(
    stored: "CheckpointReader", state: dict[str, StateTensor], learner: Learner, folder: Path
) -> None:
    if odd := sorted(state.keys() ^ stored.shapes.keys()):
        where = "checkpoint" if odd[0] in stored.shapes else "model"
        raise RunFailed(f"{folder}: {odd[0]} is only in the {where}, so it is of another model")
    if odd := sorted(_frozen_names(learner) ^ stored.frozen):
        where = "checkpoint" if odd[0] in stored.frozen else "model"
        raise RunFailed(f"{folder}: {odd[0]} is frozen only in the {where}")
    if stored.base_sha256 != learner.base_sha256:
        raise RunFailed(
            f"{folder}: its adapters were trained on weights with sha256 {stored.base_sha256}, "
            f"but this stage began with {learner.base_sha256}; restore the first weights, "
            f"or remove {folder.parent.parent} to train the adapters anew"
        )
    for name, tensor in state.items():
        if stored.shapes[name] != tensor.shape:
            raise RunFailed(
                f"{folder}: {name} has shape {list(stored.shapes[name])}, but in the "
                f"model {list(tensor.shape)}, so the checkpoint is of another model"
            )
        if stored.dtypes[name] != (dtype := dtype_name(tensor.local.dtype)):
            raise RunFailed(
                f"{folder}: {name} is {stored.dtypes[name]}, in the model {dtype}, and rounding "
                f"would change the run; export the checkpoint with the release that wrote it, "
                f"and start another run from the exported folder"
            )


class CheckpointReader:
    """Read tensors of a checkpoint by name and box. Raise RunFailed if a file is unreadable."""

    def __init__(self, folder: Path):
        state = _read_json(folder / "state.json")
        if state.get("format") != FORMAT:
            raise RunFailed(
                f"{folder}: has checkpoint format {state.get('format')}, but this release reads "
                f"{FORMAT}; finish the run with the release that wrote it"
            )
        self.step: int = state["step"]
        self.world_size: int = state["world_size"]
        self.frozen: frozenset[str] = frozenset(state.get("frozen", ()))
        self.base_sha256: str | None = state.get("base_sha256")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._folder = folder
        self._files: dict[int, Any] = {}
        self._pieces: dict[str, list[tuple[int, Box]]] = {}
        for rank in range(self.world_size):
            for name, entry in _read_json(folder / f"rank_{rank}.json").items():
                box = tuple((start, stop) for start, stop in entry["box"])
                self._pieces.setdefault(name, []).append((rank, box))
                self.shapes[name], self.dtypes[name] = tuple(entry["shape"]), entry["dtype"]

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        missing = target.numel()
        for rank, piece in self._pieces[name]:
            if not box:
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
            except Exception as error:
                raise RunFailed(f"{path}: cannot be read ({error}); {REMEDY}") from error
        return self._files[rank]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path, REMEDY)
    except OrreryError as error:
        raise RunFailed(str(error)) from error
