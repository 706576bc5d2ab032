"""A stage's checkpoints: copied when a step is done, complete some time later, and where a new attempt goes on.

- `copy`, then the step's row, then `write`: a checkpoint that counts has its row.
- The first rank's thread makes the checkpoint whole: all ranks' files, the other half where the stage has one (`beside`), the marker. Then
  it removes what is more than `trainer.checkpoint.keep`.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from orrery.manifest.errors import RunFailed
from orrery.observe.process import RoleContext
from orrery.trainer import checkpoint
from orrery.trainer.checkpoint import CheckpointWriter
from orrery.trainer.heartbeat import io_stall_s, mark_part, step_stall_s
from orrery.trainer.learner import Learner
from orrery.transport import checkpoints, visible


class StageCheckpoints:
    """Of the stage `stage`, for one rank. `beside` names the folder that another role has written for step n before step n was done.

    Leaving the context waits until the last checkpoint is whole, except after an exception.
    """

    def __init__(self, ctx: RoleContext, learner: Learner, stage: str, beside: str | None = None):
        self._ctx, self._learner, self._stage, self._beside = ctx, learner, stage, beside
        self._saver = CheckpointWriter(learner.world, ctx.health.waiting)

    def __enter__(self) -> Self:
        self._saver.__enter__()
        num_steps = (
            self._ctx.manifest.stages.sft.num_steps
            if self._stage == "sft"
            else self._ctx.manifest.stages.rl.num_steps
        )
        if any(
            checkpoints.is_due(step, self._ctx.manifest, self._stage)
            for step in range(self._learner.step + 1, num_steps + 1)
        ):
            self._saver.reserve(self._learner)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._saver.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raises RunFailed where a checkpoint could not be written."""
        self._saver.check()

    def copy(self, files: Mapping[str, bytes] | None = None) -> float:
        """Copy the state of the last step, with `files`: seconds that training was blocked for. A collective."""
        step = self._learner.step
        self._ctx.health.doing(
            "copying a checkpoint", step=step, still_s=step_stall_s(False, self._learner.world.size)
        )
        with self._ctx.metrics.span("checkpoint", step=step):
            return self._saver.copy(self._learner, self._folder / "trainer", files)

    def write(self) -> None:
        """Begin to write what was copied."""
        folder, step, begin_s = self._folder, self._learner.step, time.time()

        def complete() -> None:
            if self._beside is not None and not visible.appears(folder / self._beside):
                raise RunFailed(
                    f"{folder}: the {self._beside}'s half is missing, though batch {step} was sent; see logs/{self._beside}.0.log"
                )
            checkpoints.complete(
                folder,
                [
                    f"trainer/{checkpoint.checksum_file(rank)}"
                    for rank in range(self._learner.world.size)
                ],
            )
            checkpoints.prune(
                self._ctx.run_dir,
                self._ctx.manifest.trainer.checkpoint.keep,
                self._ctx.attempt,
                self._stage,
            )
            self._ctx.metrics.add_span("checkpoint_write", begin_s, time.time(), step=step)

        self._saver.write(complete, whole=folder / checkpoints.MARKER)

    def finish(self) -> None:
        """Until the last checkpoint is whole. A collective."""
        self._saver.finish()

    @property
    def _folder(self) -> Path:
        return checkpoints.checkpoint_dir(
            self._ctx.run_dir, self._learner.step, self._ctx.attempt, self._stage
        )


def resume(ctx: RoleContext, learner: Learner, stage: str) -> Path | None:
    """Go on from the newest complete checkpoint of `stage`: its folder, or None where there is none. A collective."""
    world = learner.world
    if (
        stage != "rl" and world.is_first
    ):  # there the orchestrator does it, before it writes its half
        checkpoints.discard_incomplete(ctx.run_dir, stage)
    newest = checkpoints.latest(ctx.run_dir, stage) or (0, 0)
    step, attempt = (
        world.each(number)[0] for number in newest
    )  # from rank 0: nodes may see a new folder late
    if not step:
        return None
    ctx.health.doing(f"resuming from step {step}", step=step, still_s=io_stall_s(world.size))
    folder = checkpoints.checkpoint_dir(ctx.run_dir, step, attempt, stage)
    visible.appears(folder / checkpoints.MARKER)
    checkpoints.verify(folder, share=(world.rank, world.size), each=mark_part)
    world.barrier()  # nobody goes on before every share is known to be sound
    checkpoint.load(learner, folder / "trainer")
    if learner.step != step:
        raise RunFailed(
            f"{folder / 'trainer'}: is of step {learner.step}; remove {folder} to go on from the checkpoint before it"
        )
    ctx.log.info("resuming after step %d", step)
    return folder
