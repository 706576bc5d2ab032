"""Copy the trainer's part of a checkpoint into shared memory, and read it on any mesh.

    checkpoints/step_<n>.attempt_<k>/trainer/
        state.json            {"format", "step", "world_size", "frozen", "base_sha256"}
        rank_<i>.json         {name: {"shape", "dtype", "box"}}, box: [start, stop) per dimension
        rank_<i>.safetensors  values in these boxes, RNG state
        rank_<i>.sha256.json  size and sha256 of both files
        published.json        {policy version: digest} (`publish.py`)

Tensors are named `weight/<parameter>`, `bias/<buffer>`, or `<key>/<parameter>` (optimizer state).
`torch.distributed.checkpoint` is not used, because it stores pickles.
"""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage, rmtree
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.json_file import read_object
from orrery.manifest.publish import sha256
from orrery.models.hf_folder import weight_files
from orrery.models.placement import Box, intersection, local_box, local_tensor, relative, slices
from orrery.runtime.run_directory import ENLARGE, SHARED_MEMORY, inputs_path
from orrery.trainer.heartbeat import mark_part
from orrery.trainer.host_memory import available_bytes, host_block, host_number
from orrery.trainer.learner import Learner
from orrery.trainer.optim import named_state
from orrery.trainer.parallel.world import World

FORMAT = 1
REMEDY = "remove its step folder to go on from the checkpoint before it"
MEMORY_REMEDY = (
    "shard over more nodes, raise the job's limit if it has one, "
    "or turn off an option that uses host memory (such as trainer.memory.optimizer_offload)"
)
# safetensors writes dtypes in the reverse of this order.
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(_NAMES)}

log = logging.getLogger(__name__)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class StateTensor:
    """A rank's shard: the region `box` of a tensor of `shape`."""

    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    writes: bool  # False if another rank writes the same region


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
    """Raise RunFailed if the checkpoint is unreadable or belongs to another model.

    Restore RNG state only if the world size is the checkpoint's.
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
        raise RunFailed(
            f"{folder}: {odd[0]} is only in the {where}, so the checkpoint is of another model"
        )
    if odd := sorted(_frozen_names(learner) ^ stored.frozen):
        where = "checkpoint" if odd[0] in stored.frozen else "model"
        raise RunFailed(f"{folder}: {odd[0]} is frozen only in the {where}")
    if stored.base_sha256 != learner.base_sha256:
        raise RunFailed(
            f"{folder}: its adapters were trained on weights with sha256 {stored.base_sha256}, "
            f"but this stage began with {learner.base_sha256}; restore the former weights, "
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
    """Read regions (`box`) of a checkpoint's tensors. Raise RunFailed if a file is unreadable."""

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


@dataclass(frozen=True)
class FileLayout:
    header: bytes
    spans: dict[str, tuple[int, int]]

    @property
    def file_bytes(self) -> int:
        return len(self.header) + max((stop for _, stop in self.spans.values()), default=0)


def layout(tensors: Mapping[str, torch.Tensor]) -> FileLayout:
    header, spans, start = {}, {}, 0
    for name in sorted(tensors, key=lambda name: (-_RANK[tensors[name].dtype], name)):
        dtype, shape = _NAMES[tensors[name].dtype], list(tensors[name].shape)
        stop = start + tensors[name].nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        spans[name], start = (start, stop), stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(len(text).to_bytes(8, "little") + text, spans)


class SharedCopy:
    """Copy of tensors in shared memory, in the format of `safetensors.torch.save_file`.

    If the bytes do not fit in /dev/shm, `path` links to an anonymous file (memfd).
    """

    def __init__(self, path: Path, device: torch.device):
        self._path, self._device = path, device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._fits, self._nameless = True, -1

    def check_room(self, num_bytes: int, world: World, spared: int = 0) -> None:
        """Raise RunFailed if this host lacks memory for its ranks' copies. A collective."""
        hosts = world.all_gather(host_number())
        available = world.all_gather(available_bytes())
        shared = world.all_gather(disk_usage(SHARED_MEMORY).free)
        spared = max(world.all_gather(spared))
        needed = world.all_gather(num_bytes - self._buffer.numel())
        here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        whose = "this rank's copy"
        if len(here) > 1:
            whose = f"the copies of the {len(here)} ranks on this host"
        total, free = sum(max(0, needed[rank]) for rank in here), min(shared[one] for one in here)
        what = f"weights and optimizer state in {whose} take"
        _check_host_memory(what, total, min(available[rank] for rank in here))
        self._fits = total <= free - spared
        if not self._fits and here[0] == world.rank:
            log.warning(
                "%.1f GB for checkpoints do not fit in %s (%.1f GB free), so a copy is "
                "lost if its trainer and saver are killed; %s",
                *(total / 1e9, SHARED_MEMORY, free / 1e9, ENLARGE),
            )

    def has_room(self, num_bytes: int) -> bool:
        return self._buffer.numel() >= num_bytes

    def reserve(self, num_bytes: int) -> None:
        if self.has_room(num_bytes):
            return
        if not self._buffer.numel():
            rmtree(self._path.parent, ignore_errors=True)
            self._path.parent.mkdir(mode=0o700)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._path.unlink(missing_ok=True)
        whose = "this rank's copy of weights and optimizer state takes"
        _check_host_memory(whose, num_bytes, available_bytes())
        error = self._allocate(num_bytes)
        if error:
            log.warning(
                "%.1f GB of host memory cannot be pinned (CUDA error %d); checkpoints block longer",
                num_bytes / 1e9,
                error,
            )

    def _allocate(self, num_bytes: int) -> int:
        if self._fits and num_bytes <= disk_usage(SHARED_MEMORY).free:
            try:
                with self._path.open("xb+") as file:
                    self._buffer, error = host_block(num_bytes, self._device, file.fileno())
                return error
            except OSError as full:  # another process took the space since the check
                if full.errno != errno.ENOSPC:
                    raise
                self._path.unlink()
        if self._nameless < 0:  # it stays open, so that a restarted saver inherits it
            self._nameless = os.memfd_create("orrery.saves")
        self._path.symlink_to(f"/proc/self/fd/{self._nameless}")
        self._buffer, error = host_block(num_bytes, self._device, self._nameless)
        return error

    def fill(self, pieces: Mapping[str, torch.Tensor]) -> int:
        """Copy `pieces` into the file. Return its size in bytes."""
        found = layout(pieces)
        self.reserve(found.file_bytes)
        header = torch.frombuffer(bytearray(found.header), dtype=torch.uint8)
        self._buffer[: len(header)] = header
        data = self._buffer[len(header) :]
        for name, (start, stop) in found.spans.items():
            piece = pieces[name].detach()
            target = data[start:stop].view(piece.dtype).view(piece.shape)
            target.copy_(piece, non_blocking=True)
            mark_part()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return found.file_bytes


def _check_host_memory(subject: str, num_bytes: int, available: int) -> None:
    if num_bytes > available:
        raise RunFailed(
            f"trainer.checkpoint: {subject} {num_bytes / 1e9:.1f} GB of host memory, "
            f"of which {available / 1e9:.1f} GB are left to this job; {MEMORY_REMEDY}"
        )
