"""Write and complete a stage's checkpoints, and resume from them.

- Metrics are written between `copy` and `write`, so a complete checkpoint has its row.
- The first rank's thread writes the marker last, then removes old checkpoints.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from orrery.manifest.errors import RunFailed
from orrery.runtime.role_context import RoleContext
from orrery.trainer import checkpoint
from orrery.trainer.checkpoint_writer import CheckpointWriter
from orrery.trainer.heartbeat import io_stall_s, mark_part, step_stall_s
from orrery.trainer.learner import Learner
from orrery.wire import checkpoints, nfs


class StageCheckpoints:
    """One rank's checkpoints. The exit completes the last, except after an exception.

    The role `beside` has written its half of step n before batch n is sent.
    """

    def __init__(self, ctx: RoleContext, learner: Learner, stage: str, beside: str | None = None):
        self._ctx, self._learner, self._stage, self._beside = ctx, learner, stage, beside
        self._writer = CheckpointWriter(learner.world, ctx.health.waiting)

    def __enter__(self) -> Self:
        self._writer.__enter__()
        manifest = self._ctx.manifest
        num_steps = (manifest.sft if self._stage == "sft" else manifest.stages.rl).num_steps
        steps_left = range(self._learner.step + 1, num_steps + 1)
        if any(self.is_due(step) for step in steps_left):
            self._writer.reserve(self._learner)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._writer.__exit__(*failure)

    def is_due(self, step: int) -> bool:
        return checkpoints.is_due(step, self._ctx.manifest, self._stage)

    def check(self) -> None:
        """Raise RunFailed if a write failed."""
        self._writer.check()

    def copy(self, files: Mapping[str, bytes] | None = None) -> float:
        """Copy the state with `files`. Return the seconds waited. A collective."""
        step, still_s = self._learner.step, step_stall_s(False, self._learner.world.size)
        self._ctx.health.doing("copying a checkpoint", step=step, still_s=still_s)
        with self._ctx.metrics.span("checkpoint", step=step):
            return self._writer.copy(self._learner, self._folder / "trainer", files)

    def write(self) -> None:
        """Write the copy in the background."""
        ctx, folder = self._ctx, self._folder
        step, num_ranks, begin_s = self._learner.step, self._learner.world.size, time.time()

        def complete() -> None:
            if self._beside is not None and not nfs.appears(folder / self._beside):
                raise RunFailed(
                    f"{folder}: the {self._beside}'s half is missing, though batch {step} was "
                    f"sent; see logs/{self._beside}.0.log"
                )
            notes = [f"trainer/{checkpoint.checksum_file(rank)}" for rank in range(num_ranks)]
            checkpoints.complete(folder, notes)
            keep = ctx.manifest.trainer.checkpoint.keep
            checkpoints.prune(ctx.run_dir, keep, ctx.attempt, self._stage)
            ctx.metrics.add_span("checkpoint_write", begin_s, time.time(), step=step)

        self._writer.write(complete, marker=folder / checkpoints.MARKER)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. A collective."""
        self._writer.finish()

    @property
    def _folder(self) -> Path:
        return checkpoints.checkpoint_dir(
            self._ctx.run_dir, self._learner.step, self._ctx.attempt, self._stage
        )


def resume(ctx: RoleContext, learner: Learner, stage: str) -> Path | None:
    """Load the newest complete checkpoint. Return its folder or None. A collective."""
    world = learner.world
    # In RL the orchestrator does this.
    if stage != "rl" and world.is_first:
        checkpoints.discard_incomplete(ctx.run_dir, stage)
    newest = checkpoints.latest(ctx.run_dir, stage) or (0, 0)
    # Other nodes may see a new folder late.
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
            f"{folder / 'trainer'}: is of step {learner.step}; "
            f"remove {folder} to go on from the checkpoint before it"
        )
    ctx.log.info("resuming after step %d", step)
    return folder
