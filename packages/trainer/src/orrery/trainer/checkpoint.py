"""Checkpoints: weights and optimizer state as each rank holds them, in safetensors, readable at any world size.

    checkpoints/step_<n>/trainer/
        state.json            {"format", "step", "world_size"}
        rank_<i>.json         {name: {"shape", "dtype", "box"}}: what rank i holds, box = [start, stop) a dimension
        rank_<i>.safetensors  those boxes, and the rank's random-number state
        rank_<i>.sha256.json  size and sha256 of rank i's two files, which rank i wrote, synced and hashed itself
        published.json        {version: digest}: what was published so far (`publish.py`)

- Names: `weight/<parameter>`, and `<key>/<parameter>` for optimizer state (`exp_avg`, `exp_avg_sq`, `step`).
- Each rank writes what it holds; of replicas, and of what is not sharded, only the first rank does. Reading intersects boxes, so
  another mesh, or another way of sharding, reads the same files.
- The folder appears whole, by a rename after every rank's file is on disk. `step_<n>` counts only once its marker is there
  (`orrery.transport.checkpoints`); what a killed process leaves is never read.
- Why not torch.distributed.checkpoint: its metadata and its tensors are pickles.
- Random-number state is restored where the world size is the same. Training draws no numbers, so at another one nothing is lost.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from orrery.manifest.errors import RunFailed
from orrery.manifest.publish import sync, write_atomic
from orrery.models.placement import local_box, local_tensor
from orrery.trainer.learner import Learner
from orrery.transport import checkpoints

FORMAT = 1
REMEDY = "remove its step folder to go on from the checkpoint before it"


def save(learner: Learner, folder: Path) -> None:
    """Write the learner's state as `folder`; every rank calls it, and returns when all is on disk and renamed."""
    world, partial = learner.world, folder.with_name(f"{folder.name}.partial")
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that died before the checkpoint was complete
        partial.mkdir(parents=True)
    world.barrier()
    index, pieces = {}, _rng_state(world.device)
    for name, tensor in _named_state(learner):
        if world.replica == 0 and (isinstance(tensor, DTensor) or world.is_first) and local_tensor(tensor).numel():
            index[name] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "box": local_box(tensor)}
            pieces[name] = local_tensor(tensor).detach().contiguous()
    mine = [partial / f"rank_{world.rank}.safetensors", partial / f"rank_{world.rank}.json"]
    save_file(pieces, mine[0])
    sync(mine[0])
    _write_json(mine[1], index)
    checkpoints.note_digests(partial / note(world.rank), mine)
    world.barrier()
    if world.is_first:
        _write_json(partial / "state.json", {"format": FORMAT, "step": learner.step, "world_size": world.size})
        partial.rename(folder)
        sync(folder.parent)
    world.barrier()


def note(rank: int) -> str:
    """The file, beside rank `rank`'s own, that says what they hold."""
    return f"rank_{rank}.sha256.json"


def load(learner: Learner, folder: Path) -> None:
    """Put the state in `folder` into the learner, whatever world size wrote it. Raises RunFailed where it does not fit the manifest."""
    world = learner.world
    state = _read_json(folder / "state.json")
    if state.get("format") != FORMAT:
        raise RunFailed(f"{folder}: checkpoint format {state.get('format')}, but {FORMAT} is read here; finish the run with what wrote it")
    stored = _Stored(folder, state["world_size"])
    _make_optimizer_state(learner, stored)
    mine = dict(_named_state(learner))
    if odd := sorted(mine.keys() ^ stored.shapes.keys()):
        raise RunFailed(f"{folder}: {odd[0]} is only in the {'checkpoint' if odd[0] in stored.shapes else 'model'}; it is of another model")
    for name, tensor in mine.items():
        if stored.shapes[name] != list(tensor.shape):
            raise RunFailed(f"{folder}: {name} has shape {stored.shapes[name]}, the model's has {list(tensor.shape)}: another model")
    with torch.no_grad():
        for name, tensor in mine.items():
            stored.read(name, local_box(tensor), local_tensor(tensor))
    if state["world_size"] == world.size:
        _restore_rng(stored.file(world.rank), world.device)
    learner.step = state["step"]


def _named_state(learner: Learner) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in learner.weights.items():
        yield f"weight/{name}", weight
        for key, value in sorted(learner.optimizer.state.get(weight, {}).items()):
            yield f"{key}/{name}", value


def _make_optimizer_state(learner: Learner, stored: "_Stored") -> None:
    """Optimizer state without content, placed as the first step would place it: like its weight, or whole on every rank."""
    keys = sorted({name.partition("/")[0] for name in stored.shapes} - {"weight"})
    for name, weight in learner.weights.items():
        for key in keys:
            if (shape := stored.shapes.get(f"{key}/{name}")) is None:
                continue
            dtype = stored.dtypes[f"{key}/{name}"]
            if shape == list(weight.shape):
                learner.optimizer.state[weight][key] = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
            else:
                learner.optimizer.state[weight][key] = torch.zeros(shape, dtype=dtype, device=learner.world.device)


class _Stored:
    """The rank files of one checkpoint: every tensor's shape, and any box of it."""

    def __init__(self, folder: Path, world_size: int):
        self._folder = folder
        self._files: dict[int, Any] = {}
        self._pieces: dict[str, list[tuple[int, list[list[int]]]]] = {}
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for rank in range(world_size):
            for name, entry in _read_json(folder / f"rank_{rank}.json").items():
                self._pieces.setdefault(name, []).append((rank, entry["box"]))
                self.shapes[name], self.dtypes[name] = entry["shape"], getattr(torch, entry["dtype"])

    def file(self, rank: int) -> Any:
        if rank not in self._files:
            path = self._folder / f"rank_{rank}.safetensors"
            try:
                self._files[rank] = safe_open(path, framework="pt")
            except Exception as error:  # safetensors has its own exception; a missing file is an OSError
                raise RunFailed(f"{path}: cannot be read ({error}); {REMEDY}") from error
        return self._files[rank]

    def read(self, name: str, box: tuple[tuple[int, int], ...], target: torch.Tensor) -> None:
        """Fill `target`, which is the box `box` of tensor `name`."""
        missing = target.numel()
        for rank, piece in self._pieces[name]:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece, strict=True)]
            if not box:  # a scalar has no dimensions to slice
                target.copy_(self.file(rank).get_tensor(name))
                missing = 0
            elif all(low < high for low, high in common):
                source = tuple(slice(low - c, high - c) for (low, high), (c, _) in zip(common, piece, strict=True))
                part = self.file(rank).get_slice(name)[source]
                target[tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(common, box, strict=True))].copy_(part)
                missing -= part.numel()
        if missing:
            raise RunFailed(f"{self._folder}: {missing} values of {name} are in no file; {REMEDY}")


def _rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_rng(file: Any, device: torch.device) -> None:
    torch.set_rng_state(file.get_tensor("rng/cpu"))
    if device.type == "cuda":
        torch.cuda.set_rng_state(file.get_tensor("rng/cuda"), device)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunFailed(f"{path}: not a file of a trainer's checkpoint ({error}); {REMEDY}") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(content) + "\n").encode())
