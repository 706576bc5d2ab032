"""SFT: examples as the same columns that RL trains on, with all weight on the cross-entropy component.

- In: the chats of `stages.sft.data` (`chats.py`), masked by `trained_roles`, in the order that `sft_data.py` says. Every rank computes the
  same plan and keeps its own part: no rank tells another what to train.
- So the position in the data is the number of steps done, and a stage that was killed goes on from its newest checkpoint to the same bits.
- The validation loss of step n is that of the weights after step n: before the first step, every `interval_steps`, after the last. A
  stage that goes on from step n says that of step n again.
"""

import time

from orrery.observe.deadline import scaled
from orrery.observe.process import RoleContext
from orrery.trainer.heartbeat import step_stall_s, warms_up
from orrery.trainer.learner import Learner, count_totals
from orrery.trainer.schedule import factor
from orrery.trainer.sft_data import Examples, batches, prefetch
from orrery.trainer.stage_checkpoints import StageCheckpoints
from orrery.trainer.validation import ValidationSet
from orrery.transport import checkpoints
from orrery.transport.packing import pack_for

TOKENISE_DEADLINE_S = 600.0


def sft(
    learner: Learner, examples: Examples, validation: ValidationSet | None, ctx: RoleContext
) -> None:
    """Train what is left of `stages.sft.num_steps` on `examples`."""
    manifest, spec, world = ctx.manifest, ctx.manifest.stages.sft, learner.world
    first_step, has_warm_up = learner.step + 1, warms_up(manifest.trainer, world.device)
    with (
        StageCheckpoints(ctx, learner, "sft") as saving,
        prefetch(batches(examples, manifest, learner.step)) as take,
    ):
        for step in range(first_step, spec.num_steps + 1):
            saving.check()
            if validation is not None and learner.step % spec.validation.interval_steps == 0:
                _validate(validation, learner, ctx, is_first=step == first_step)
            begin_s = time.monotonic()
            with ctx.health.waiting(
                f"batch {step} to be tokenised", deadline_s=scaled(TOKENISE_DEADLINE_S)
            ):
                batch = take()
            wait_s = time.monotonic() - begin_s
            ctx.health.doing(
                "sft", step=step, still_s=step_stall_s(step == first_step, world.size, has_warm_up)
            )
            mine = [
                batch.select(samples)
                for samples in pack_for(manifest, batch.lengths)[world.data_rank]
            ]
            outcome = learner.learn(
                mine,
                len(mine),
                count_totals(mine, world),
                factor(spec.schedule, step, spec.num_steps),
            )
            is_due = checkpoints.is_due(step, manifest, "sft")
            blocked_s = saving.copy() if is_due else 0.0
            if world.is_first:
                step_s = time.monotonic() - begin_s
                speed = {
                    "step_time_s": step_s,
                    "checkpoint_blocked_s": blocked_s,
                    "tokens_per_s": outcome.metrics["num_tokens"] / step_s,
                }
                ctx.metrics.write(step, **outcome.metrics, **speed, wait_s=wait_s)
                if step % 20 == 0 or step == spec.num_steps:
                    ctx.log.info(
                        "sft step %d of %d: loss %.4f",
                        step,
                        spec.num_steps,
                        outcome.metrics["loss"],
                    )
            if is_due:
                saving.write()
        if validation is not None:
            _validate(validation, learner, ctx, is_first=False)


def _validate(
    validation: ValidationSet, learner: Learner, ctx: RoleContext, is_first: bool
) -> None:
    step, begin_s = learner.step, time.monotonic()
    limit_s = step_stall_s(
        is_first, learner.world.size, warms_up(ctx.manifest.trainer, learner.world.device)
    )
    ctx.health.doing("validating", step=step, still_s=limit_s)
    with ctx.metrics.span("validation", step=step):
        loss, num_tokens = validation.loss(learner)
    if learner.world.is_first:
        spent = {"num_validation_tokens": num_tokens, "validation_s": time.monotonic() - begin_s}
        ctx.metrics.write(step, event="validation", validation_loss=loss, **spent)
        ctx.log.info("sft step %d: validation loss %.4f on %d tokens", step, loss, num_tokens)
