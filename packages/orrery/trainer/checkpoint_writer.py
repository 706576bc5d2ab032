"""Write checkpoints during training, and resume from them.

- Training waits only for the copy into shared memory and for the previous checkpoint. A saver
  process (`saver.py`) writes the copy to disk.
- Callers write a step's metrics before its checkpoint, because resumed runs do not repeat the step.
"""

import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from msgspec.structs import replace

from orrery.manifest.errors import RunFailed, explain_os_error
from orrery.manifest.publish import make_folder
from orrery.models.placement import local_tensor
from orrery.runtime.role_context import RoleContext
from orrery.runtime.run_directory import (
    SHARED_MEMORY,
    remove_memory,
    saves_prefix,
    whole_checkpoints,
)
from orrery.runtime.timing import scaled
from orrery.trainer import checkpoint
from orrery.trainer.checkpoint import (
    SharedCopy,
    StateTensor,
    dtype_name,
    layout,
    rng_state,
    state_header,
    state_of,
)
from orrery.trainer.heartbeat import io_stall_s, mark_part, step_stall_s
from orrery.trainer.learner import Learner
from orrery.trainer.optim import last_not_finite
from orrery.trainer.parallel.world import World
from orrery.trainer.saver import (
    COPY,
    JOB,
    WRITE_DEADLINE_S,
    Completion,
    SaveJob,
    Saver,
    partial_of,
)
from orrery.wire import checkpoints, nfs

UPLOAD_DEADLINE_S = 6 * 3600.0

Waiting = Callable[[str, float, float | None], AbstractContextManager[object]]


def _no_wait(what: str, deadline_s: float, behind_s: float | None) -> AbstractContextManager:
    return nullcontext()


class CheckpointWriter:
    """Save checkpoints: call `copy`, then `write`. `check` raises errors of past writes.

    The `with` block's end waits for the last checkpoint.
    """

    def __init__(
        self,
        world: World,
        waiting: Waiting = _no_wait,
        memory: Path | None = None,
        saver: Callable[[Path], Saver] = Saver,
    ):
        self._world, self._waiting = world, waiting
        self._memory = memory or SHARED_MEMORY / f"orrery.saves-{secrets.token_hex(8)}"
        self._host, self._saver = SharedCopy(self._memory / COPY, world.device), saver(self._memory)
        self._copied: SaveJob | None = None
        self._work: _BackgroundWork | None = None
        self._incomplete: tuple[str, Path] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
                self._world.at_end.append(self._await_saver)
        finally:
            self._saver.close()

    def _await_saver(self) -> None:
        with self._waiting("the saver to end", scaled(UPLOAD_DEADLINE_S), None):
            self._saver.wait()

    def rank_bytes(self, learner: Learner) -> int:
        state = {name: one.local for name, one in state_of(learner).items() if one.writes}
        return layout(state | rng_state(self._world.device)).file_bytes

    def reserve(self, learner: Learner, spared: int = 0) -> None:
        """Start allocating shared memory. Leave `spared` bytes free. A collective."""
        self.wait()
        num_bytes = self.rank_bytes(learner)
        self._host.check_room(num_bytes, self._world, spared)
        self._work = _BackgroundWork(lambda: self._host.reserve(num_bytes), _memory_of(num_bytes))

    def copy(
        self, learner: Learner, folder: Path, files: Mapping[str, bytes] | None = None
    ) -> float:
        """Copy the state into shared memory. Return the seconds taken. A collective.

        Raise RunFailed if HSDP replicas differ or a value is not finite.
        """
        begin_s = time.monotonic()
        self._await_complete()
        (self._memory / JOB).unlink(missing_ok=True)
        _check_finite(learner)
        if self._world.is_first:
            shutil.rmtree(partial_of(folder), ignore_errors=True)
            make_folder(partial_of(folder))
        compare_replicas(learner.weights.values(), self._world, learner.step)
        self._world.barrier()
        state = state_of(learner).items()
        mine = {name: tensor for name, tensor in state if tensor.writes and tensor.local.numel()}
        num_bytes = self._fill(
            {name: tensor.local for name, tensor in mine.items()} | rng_state(self._world.device)
        )
        files = dict(files or {}) | {"state.json": _json(state_header(learner))}
        rank, size = self._world.rank, self._world.size
        self._copied = SaveJob(str(folder), rank, size, num_bytes, _json(_index(mine)), files)
        return time.monotonic() - begin_s

    def _fill(self, pieces: dict[str, torch.Tensor]) -> int:
        num_bytes = layout(pieces).file_bytes
        if not self._host.has_room(num_bytes):
            with self._waiting(_memory_of(num_bytes), scaled(WRITE_DEADLINE_S), None):
                self._host.reserve(num_bytes)
        return self._host.fill(pieces)

    def write(
        self,
        on_written: Callable[[], object] = lambda: None,
        marker: Path | None = None,
        completion: Completion | None = None,
    ) -> None:
        """Start saving the copy. Rank 0 calls `on_written` when all ranks have saved.

        `marker`: path that exists after completion (default: the checkpoint's folder).
        """
        copied, self._copied = self._copied, None
        assert copied is not None, "copy first"
        folder, is_first = Path(copied.folder), self._world.is_first
        job = replace(copied, completion=completion if is_first else None)
        self._saver.offer(job)

        def work() -> None:
            self._saver.save()
            if is_first:
                on_written()

        what = f"the checkpoint in {folder.parent.name}"
        self._incomplete = what, marker or folder
        self._work = _BackgroundWork(work, what)

    @property
    def is_idle(self) -> bool:
        return self._work is None or self._work.is_done

    def check(self) -> None:
        if self.is_idle:
            self.wait()

    def wait(self) -> None:
        if (work := self._work) is None:
            return
        deadline_s = scaled(WRITE_DEADLINE_S)
        is_done = work.is_done
        with nullcontext() if is_done else self._waiting(work.what, deadline_s, None):
            work.join(deadline_s)
        self._work = None  # stays set if `join` raises, so that `wait` can be repeated
        if work.error is not None:
            raise work.error

    def finish(self) -> None:
        self._await_complete()
        self._world.barrier()

    def _await_complete(self) -> None:
        """Wait for the previous checkpoint's marker. Poll, because a collective could time out."""
        self.wait()
        expected, self._incomplete = self._incomplete, None
        if expected is not None and not self._world.is_first:
            what, marker = expected
            deadline_s = scaled(WRITE_DEADLINE_S)
            with self._waiting(what, deadline_s, io_stall_s(self._world.size)):
                if not nfs.appears(marker, deadline_s):
                    raise _too_slow(what, deadline_s)


class _BackgroundWork:
    def __init__(self, work: Callable[[], object], what: str):
        self.what, self._work = what, work
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except OSError as error:
            self.error = RunFailed(explain_os_error(error))
            self.error.__cause__ = error
        except Exception as error:
            self.error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self, deadline_s: float) -> None:
        self._thread.join(deadline_s)
        if not self.is_done:
            raise _too_slow(self.what, deadline_s)


def _check_finite(learner: Learner) -> None:
    state, step = state_of(learner), learner.step
    found = learner.world.all_gather(last_not_finite(tensor.local for tensor in state.values()))
    if (worst := max(found)) >= 0:
        raise RunFailed(
            f"step {step}: after its update {list(state)[worst]} is not finite on rank "
            f"{found.index(worst)}, so no checkpoint is written; start again from the previous "
            f"checkpoint, and if that fails too, lower the optimizer's lr or max_grad_norm"
        )


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_replicas(weights: Iterable[torch.Tensor], world: World, step: int) -> None:
    """Raise RunFailed on every rank if HSDP replicas differ. A collective."""
    count = world.axis_size("dp_replicate")
    if count == 1:
        return
    prints, num_shards = world.all_gather(fingerprint(weights)), world.size // count
    for rank, found in enumerate(prints[num_shards:], num_shards):
        if found != prints[first := rank % num_shards]:
            raise RunFailed(
                f"step {step}: rank {rank} and rank {first} must have equal weights "
                f"(dp_replicate {count}), but they differ, so no checkpoint is written; check "
                f"the devices of both, and start again from the previous checkpoint"
            )


@torch.no_grad()
def fingerprint(weights: Iterable[torch.Tensor]) -> int:
    sums = []
    for weight in weights:
        shard = local_tensor(weight.detach())
        sums.append(shard.contiguous().view(-1).view(_WORDS[shard.itemsize]).sum(dtype=torch.int64))
    if not sums:
        return 0
    device, mixed = sums[0].device, 0
    same_device = [value if value.device == device else value.cpu() for value in sums]
    for value in torch.stack(same_device).tolist():
        mixed = (mixed * 1_000_003 + value) % (2**61 - 1)
    return mixed


def _index(state: Mapping[str, StateTensor]) -> dict[str, Any]:
    return {
        name: {"shape": tensor.shape, "dtype": dtype_name(tensor.local.dtype), "box": tensor.box}
        for name, tensor in state.items()
    }


def _too_slow(what: str, deadline_s: float) -> RunFailed:
    return RunFailed(
        f"{what}: not done after {deadline_s:.0f} s; "
        f"is the disk of this run reachable, and fast enough?"
    )


def _memory_of(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB of memory for checkpoints"


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content) + "\n").encode()


class StageCheckpoints:
    """Write a rank's checkpoints of a stage.

    `beside`: another role that writes part of them. `spared`: bytes of shared memory to leave free.
    """

    def __init__(
        self,
        ctx: RoleContext,
        learner: Learner,
        stage: str,
        beside: str | None = None,
        spared: int = 0,
    ):
        self._ctx, self._learner, self._stage, self._beside = ctx, learner, stage, beside
        self._spared = spared
        # The attempt is in the name, because an earlier attempt's saver may still run.
        memory = SHARED_MEMORY / f"{saves_prefix(ctx.run_dir)}{learner.world.rank}.{ctx.attempt}"
        self._writer = CheckpointWriter(learner.world, ctx.health.waiting, memory)

    def __enter__(self) -> Self:
        self._writer.__enter__()
        manifest = self._ctx.manifest
        num_steps = (manifest.sft if self._stage == "sft" else manifest.stages.rl).num_steps
        if num_left := sum(map(self.is_due, range(self._learner.step + 1, num_steps + 1))):
            self._check_disk(num_left)
            # Remove killed jobs' checkpoint copies before any rank allocates memory.
            remove_memory(saves_prefix(self._ctx.run_dir))
            self._writer.reserve(self._learner, self._spared)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._writer.__exit__(*failure)

    def _check_disk(self, num_left: int) -> None:
        """Raise RunFailed if the next checkpoints do not fit on disk. A collective."""
        run_dir, keep = self._ctx.run_dir, self._ctx.manifest.trainer.checkpoint.keep
        held = min(keep, len(whole_checkpoints(run_dir, self._stage)))
        # + 1, because the oldest is removed after the newest is written.
        count = min(num_left, keep + 1 - held)
        each = sum(self._learner.world.all_gather(self._writer.rank_bytes(self._learner)))
        if count * each > (free := shutil.disk_usage(run_dir).free):
            raise RunFailed(
                f"trainer.checkpoint: the next {count} checkpoints ({each / 1e9:.3g} GB each) need "
                f"{count * each / 1e9:.3g} GB on the disk of {run_dir}, which has "
                f"{free / 1e9:.3g} GB free; remove unused folders in runs/, or lower "
                f"trainer.checkpoint.keep ({keep})"
            )

    def is_due(self, step: int) -> bool:
        return checkpoints.is_due(step, self._ctx.manifest, self._stage)

    def check(self) -> None:
        self._writer.check()

    def copy(self, files: Mapping[str, bytes] | None = None) -> float:
        step, trainer = self._learner.step, self._ctx.manifest.trainer
        still_s = step_stall_s(self._learner.world, trainer)
        self._ctx.health.doing("copying a checkpoint", step=step, still_s=still_s)
        with self._ctx.metrics.span("checkpoint", step=step):
            return self._writer.copy(self._learner, self._folder / "trainer", files)

    def write(self) -> None:
        ctx, step, begin_s = self._ctx, self._learner.step, time.time()
        keep = ctx.manifest.trainer.checkpoint.keep
        self._writer.write(
            lambda: ctx.metrics.add_span("checkpoint_write", begin_s, time.time(), step=step),
            self._folder / checkpoints.MARKER,
            Completion(str(ctx.run_dir), self._stage, ctx.attempt, keep, self._beside),
        )

    def finish(self) -> None:
        self._writer.finish()

    @property
    def _folder(self) -> Path:
        return checkpoints.checkpoint_dir(
            self._ctx.run_dir, self._learner.step, self._ctx.attempt, self._stage
        )


def resume(ctx: RoleContext, learner: Learner, stage: str) -> Path | None:
    """Load the newest complete checkpoint. Return its folder or None. A collective."""
    world = learner.world
    # In RL the orchestrator discards incomplete checkpoints.
    if stage != "rl" and world.is_first:
        checkpoints.discard_incomplete(ctx.run_dir, stage)
    newest = checkpoints.latest(ctx.run_dir, stage) or (0, 0)
    # Rank 0 chooses, because other nodes may see a new folder late.
    step, attempt = (world.all_gather(number)[0] for number in newest)
    if not step:
        return None
    ctx.health.doing(f"resuming from step {step}", step=step, still_s=io_stall_s(world.size))
    folder = checkpoints.checkpoint_dir(ctx.run_dir, step, attempt, stage)
    nfs.appears(folder / checkpoints.MARKER)
    checkpoints.verify(folder, share=(world.rank, world.size), each=mark_part)
    world.barrier()
    checkpoint.load(learner, folder / "trainer")
    if learner.step != step:
        raise RunFailed(
            f"{folder / 'trainer'}: contains step {learner.step}, not {step}; "
            f"remove {folder} to resume from the previous checkpoint"
        )
    ctx.log.info("resuming after step %d", step)
    return folder
