"""Checkpoints: weights and optimizer state as each rank holds them, in safetensors, readable at any world size and mesh.

    checkpoints/step_<n>.attempt_<k>/trainer/
        state.json            {"format", "step", "world_size", "frozen", "base_sha256"}
        rank_<i>.json         {name: {"shape", "dtype", "box"}}: what rank i holds, box = [start, stop) a dimension
        rank_<i>.safetensors  those boxes, and the rank's random-number state
        rank_<i>.sha256.json  size and sha256 of rank i's two files, which rank i wrote, synced and hashed itself
        published.json        {version: digest}: what was published so far (`publish.py`)

- Names: `weight/<parameter>`, and `<key>/<parameter>` for optimizer state (`exp_avg`, `exp_avg_sq`, `step`).
- Each rank writes what it holds; of replicas, and of what is not sharded, only the first rank does. Reading intersects boxes
  (`stored.py`), so another mesh, or another way of sharding, reads the same files.
- What is not finite is not stored: the checkpoint before, which is good, would go for it, and every attempt would end as this one.
- Frozen weights (those that adapters are added to) are named and not stored: the folder that the stage began with has them,
  and its digest is stored (`base.py`).
- Training waits only while what a rank holds is copied into host memory (`host_copy.py`). A thread writes the copy; another checkpoint
  waits until the one before it is done, so at most one is on its way.
- Threads take part in no collective. Each rank's leaves its note of sha256; the first rank's waits for all notes, then renames the folder,
  which so appears whole; the others' main threads look for it before they meet the first rank in the next collective, whose own deadline
  is shorter. A checkpoint counts only once its marker is there (`orrery.transport.checkpoints`); a process that is killed
  leaves nothing that is read, and a run goes on from the newest checkpoint that counts.
- What fails in the thread ends its rank at the next step, with one sentence.
- Why not torch.distributed.checkpoint: its metadata and its tensors are pickles.
- Random-number state is restored where the world size is the same. Training draws no numbers, so at another one nothing is lost.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

from orrery.manifest.errors import RunFailed
from orrery.manifest.publish import make_folder, publish_folder
from orrery.models.placement import Box, local_box, local_tensor
from orrery.observe.deadline import scaled
from orrery.observe.system_error import explain
from orrery.trainer import replicas
from orrery.trainer.heartbeat import io_stall_s, mark_part
from orrery.trainer.host_copy import HostCopy
from orrery.trainer.learner import Learner
from orrery.trainer.optim import last_not_finite, named_state
from orrery.trainer.parallel.world import World
from orrery.trainer.safetensors_file import Stopped, write
from orrery.trainer.stored import FORMAT, CheckpointReader
from orrery.transport import checkpoints, visible

WRITE_DEADLINE_S = 1800.0
ABANDON_S = 20.0  # for the thread to notice that its process ends
POLL_S = 0.1

Stop = Callable[[], bool]
Waiting = Callable[[str, float, float | None], AbstractContextManager[object]]
log = logging.getLogger(__name__)


def save(learner: Learner, folder: Path) -> None:
    """Write the learner's state as `folder`; every rank calls it, and returns when all is on disk and renamed."""
    with CheckpointWriter(learner.world) as saver:
        saver.copy(learner, folder)
        saver.write()


def load(learner: Learner, folder: Path) -> None:
    """Put the state in `folder` into the learner, whatever world size wrote it. Raises RunFailed where it does not fit the manifest."""
    stored, mine = CheckpointReader(folder), state_of(learner)
    if odd := sorted(mine.keys() ^ stored.shapes.keys()):
        raise RunFailed(
            f"{folder}: {odd[0]} is only in the {'checkpoint' if odd[0] in stored.shapes else 'model'}; it is of another model"
        )
    if odd := sorted(frozen_names(learner) ^ stored.frozen):
        raise RunFailed(
            f"{folder}: {odd[0]} is frozen only in the {'checkpoint' if odd[0] in stored.frozen else 'model'}: another model"
        )
    if stored.base_sha256 != learner.base_sha256:
        raise RunFailed(
            f"{folder}: its adapters were trained on weights with sha256 {stored.base_sha256}, and this stage began with "
            f"{learner.base_sha256}; "
            f"put those weights back, or remove {folder.parent.parent} to train the adapters anew"
        )
    for name, held in mine.items():
        if stored.shapes[name] != held.shape:
            raise RunFailed(
                f"{folder}: {name} has shape {list(stored.shapes[name])}, the model's has {list(held.shape)}; it is of another model"
            )
        if stored.dtypes[name] != (mine_is := str(held.local.dtype).removeprefix("torch.")):
            raise RunFailed(
                f"{folder}: {name} is {stored.dtypes[name]}, the model's is {mine_is}, and rounding would change the run without a word; "
                f"export it with the Orrery that wrote it, and start another run from the folder"
            )
    with torch.no_grad():
        for name, held in mine.items():
            stored.read(name, held.box, held.local)
            mark_part()
    if stored.world_size == learner.world.size:
        _restore_rng(stored.file(learner.world.rank), learner.world.device)
    learner.step = stored.step


def checksum_file(rank: int) -> str:
    """The file, beside rank `rank`'s own, that says what they hold."""
    return f"rank_{rank}.sha256.json"


# What there is ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the state, as far as this rank holds it: `local` is the box `box` of what has `shape` in all."""

    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    writes: bool  # False where another rank writes the same


def state_of(learner: Learner) -> dict[str, StateTensor]:
    """All that training changes."""
    held = {}
    for name, weight in learner.weights.items():
        writes = _is_first_copy(weight, learner.world)
        held[f"weight/{name}"] = StateTensor(
            tuple(weight.shape), local_box(weight), local_tensor(weight).detach(), writes
        )
    for key, name, local, box in named_state(learner.optimizer, learner.weights):
        writes = held[f"weight/{name}"].writes if box else learner.world.is_first
        held[f"{key}/{name}"] = StateTensor(
            held[f"weight/{name}"].shape if box else (), box, local, writes
        )
    return held


def frozen_names(learner: Learner) -> frozenset[str]:
    return frozenset(
        name for name, weight in learner.policy.named_parameters() if not weight.requires_grad
    )


def _is_first_copy(weight: torch.Tensor, world: World) -> bool:
    """Whether no rank before this one holds the same box."""
    if not isinstance(weight, DTensor):
        return world.is_first
    coordinate = weight.device_mesh.get_coordinate()
    if coordinate is None or world.replica:
        return False
    return not any(
        at
        for at, placement in zip(coordinate, weight.placements, strict=True)
        if placement.is_replicate()
    )


def _rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_rng(file: Any, device: torch.device) -> None:
    torch.set_rng_state(file.get_tensor("rng/cpu"))
    if device.type == "cuda" and "rng/cuda" in file.keys():  # a run that began on CPUs has none  # noqa: SIM118
        torch.cuda.set_rng_state(file.get_tensor("rng/cuda"), device)


# Write --------------------------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes checkpoints beside training; every rank of `world` has one. `waiting(what, deadline_s, behind_s)` is told of every wait.

    `copy`, then `write`, at every checkpoint; `check` at every step. Leaving the context finishes what is on its way, or after an exception
    gives it up.
    """

    def __init__(
        self, world: World, waiting: Waiting = lambda what, deadline_s, behind_s: nullcontext()
    ):
        self._world, self._waiting = world, waiting
        self._host = HostCopy(world.device)
        self._copied: _Copied | None = None
        self._work: _Work | None = None
        self._whole: tuple[str, Path] | None = (
            None  # the last checkpoint, and what is there when it is whole
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        elif self._work is not None:
            self._work.abandon()

    def reserve(self, learner: Learner) -> None:
        """Make room in host memory for the first copy, beside training. A collective."""
        self.wait()
        mine = [held.local for held in state_of(learner).values() if held.writes] + list(
            _rng_state(self._world.device).values()
        )
        num_bytes = sum(tensor.nbytes for tensor in mine)
        self._host.check_room(num_bytes, self._world)
        self._work = _Work(lambda stop: self._host.reserve(num_bytes), _host_memory(num_bytes))

    def copy(
        self, learner: Learner, folder: Path, files: Mapping[str, bytes] | None = None
    ) -> float:
        """Copy what `folder` is to hold; seconds that it took, after which training may go on. `files` go along as they are.

        A collective. Waits first for the checkpoint before, if it is not whole yet. Raises RunFailed where replicas differ, or something
        is not finite.
        """
        begin_s = time.monotonic()
        self._await_whole()
        _check_finite(learner)
        partial = folder.with_name(f"{folder.name}.partial")
        if self._world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            make_folder(partial)
        replicas.compare(learner.weights.values(), self._world, learner.step)
        self._world.barrier()
        mine = {
            name: held
            for name, held in state_of(learner).items()
            if held.writes and held.local.numel()
        }
        pieces = {name: held.local for name, held in mine.items()} | _rng_state(self._world.device)
        num_bytes = sum(piece.nbytes for piece in pieces.values())
        if not self._host.has_room(num_bytes):
            with self._waiting(_host_memory(num_bytes), scaled(WRITE_DEADLINE_S), None):
                self._host.reserve(num_bytes)
        self._host.fill(pieces)
        index = {
            name: {
                "shape": held.shape,
                "dtype": str(held.local.dtype).removeprefix("torch."),
                "box": held.box,
            }
            for name, held in mine.items()
        }
        state = {
            "format": FORMAT, "step": learner.step, "world_size": self._world.size, "frozen": sorted(frozen_names(learner)),
            "base_sha256": learner.base_sha256,
        }  # fmt: skip
        self._copied = _Copied(
            folder, partial, _json(index), dict(files or {}) | {"state.json": _json(state)}
        )
        return time.monotonic() - begin_s

    def write(self, then: Callable[[], object] = lambda: None, whole: Path | None = None) -> None:
        """Begin to write what was copied; in the first rank's thread `then` is called after the folder has its name.

        `whole`: what `then` leaves when the checkpoint is whole; the folder, where there is nothing more.
        """
        copied, self._copied = self._copied, None
        assert copied is not None, "copy first"
        what = f"the checkpoint in {copied.folder.parent.name}"
        self._whole = what, whole or copied.folder
        self._work = _Work(lambda stop: self._write(copied, then, stop), what)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return self._work is None or self._work.is_done

    def check(self) -> None:
        """Raises what has failed since; waits for nothing."""
        if self.is_idle:
            self.wait()

    def wait(self) -> None:
        """Until this rank has no more to do for the last checkpoint: on the first rank, until it is whole. Raises what failed."""
        if (work := self._work) is not None:
            with (
                nullcontext()
                if work.is_done
                else self._waiting(work.what, scaled(WRITE_DEADLINE_S), None)
            ):
                work.join(scaled(WRITE_DEADLINE_S))
            self._work = None  # only now: whoever is interrupted while it waits gives it up
            if work.error is not None:
                raise work.error

    def finish(self) -> None:
        """Until the last checkpoint is whole, for every rank. A collective."""
        self._await_whole()
        self._world.barrier()

    def _await_whole(self) -> None:
        """Until the last checkpoint is whole. No collective: one ends before WRITE_DEADLINE_S, and cannot say what is waited for."""
        self.wait()
        expected, self._whole = self._whole, None
        if expected is not None and not self._world.is_first:
            what, whole = expected
            deadline_s = scaled(WRITE_DEADLINE_S)
            with self._waiting(what, deadline_s, io_stall_s(self._world.size)):
                if not visible.appears(whole, deadline_s):
                    raise _too_slow(what, deadline_s)

    def _write(self, copied: "_Copied", then: Callable[[], object], stop: Stop) -> None:
        tensors, index = (
            copied.partial / f"rank_{self._world.rank}.{suffix}"
            for suffix in ("safetensors", "json")
        )
        written = {
            tensors.name: write(tensors, self._host.buffers(), stop),
            index.name: write(index, [copied.index], stop),
        }
        checkpoints.write_note(copied.partial / checksum_file(self._world.rank), written)
        if self._world.is_first:
            for name, content in copied.files.items():
                (copied.partial / name).write_bytes(content)
            _await_notes(copied.partial, self._world.size, stop)
            publish_folder(copied.partial, copied.folder)
            then()


@dataclass(frozen=True)
class _Copied:
    folder: Path
    partial: Path
    index: bytes
    files: dict[str, bytes]


def _check_finite(learner: Learner) -> None:
    """Raises RunFailed, on every rank, where a weight or the optimizer's state of it is not finite on one. A collective.

    What a damaged moment does shows a step later still than what a weight does, and whoever went on from either would end there each time.
    """
    held, step = state_of(learner), learner.step
    found = learner.world.each(last_not_finite(one.local for one in held.values()))
    if (worst := max(found)) >= 0:
        raise RunFailed(
            f"step {step}: after its update {list(held)[worst]} is not finite on rank {found.index(worst)}; nothing of it is stored: "
            f"start again from the checkpoint before it, and where that ends the same, lower the optimizer's lr or max_grad_norm"
        )


def _await_notes(partial: Path, world_size: int, stop: Stop) -> None:
    """Until every rank's note is there. `partial` was made for this checkpoint alone, so no note in it is an older one."""
    end_s = time.monotonic() + scaled(WRITE_DEADLINE_S)
    while True:
        found = set(
            os.listdir(partial)
        )  # a listing: a network file system may remember for long that a name was not there
        missing = [rank for rank in range(world_size) if checksum_file(rank) not in found]
        if not missing:
            return
        if stop():
            raise Stopped(partial)
        if time.monotonic() >= end_s:
            raise RunFailed(
                f"{partial}: nothing of rank {missing[0]} after {WRITE_DEADLINE_S:g} s; see logs/trainer.{missing[0]}.log"
            )
        time.sleep(POLL_S)


class _Work:
    """Something that a thread does beside training."""

    def __init__(self, work: Callable[[Stop], object], what: str):
        self.what = what
        self._work, self._stop = work, threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, name=what, daemon=True
        )  # never keeps a process that fails from ending
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work(self._stop.is_set)
        except OSError as error:
            self.error = RunFailed(
                f"{explain(error)}; the run goes on from its newest whole checkpoint"
            )
            self.error.__cause__ = error
        except Exception as error:  # raised where somebody waits
            self.error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self, deadline_s: float) -> None:
        self._thread.join(deadline_s)
        if not self.is_done:
            raise _too_slow(self.what, deadline_s)

    def abandon(self) -> None:
        self._stop.set()
        self._thread.join(ABANDON_S)
        if not self.is_done:
            log.warning("%s: left unfinished", self.what)


def _too_slow(what: str, deadline_s: float) -> RunFailed:
    return RunFailed(
        f"{what}: not done after {deadline_s:.0f} s; is the disk of this run reachable, and fast enough?"
    )


def _host_memory(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB of host memory for checkpoints"


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content) + "\n").encode()
