"""The RL stage as the trainer sees it. Batch n (from 1) trains version n − 1 and makes version n.

    publish the version we start from
    for batch n:  wait → forward and backward each micro-batch as it arrives → clip → step → publish version n
                  → copy for a checkpoint when due → row → the checkpoint is written while batch n + 1 is trained
    compare log-probs on the last evaluation's rollouts → export the policy → the last checkpoint is whole

- A batch with `compare` comes after the last. It comes early if the policy is good enough. The step
  before it is then the last, and gets its checkpoint.
- A batch that says `wind_down` is not trained: the step before it gets its checkpoint, unless it has one, and every rank ends.
- Every wait has a name and a deadline; every phase is a span; every step is one row of metrics (rank 0).
- A batch says which weights sampled it, by version and digest: others than those that were published end the run.
- A step's row is written before its checkpoint, after which nobody makes the step again.
- A checkpoint of step n is complete only with the orchestrator's half, which stands there before batch n is sent. It becomes complete
  some time after step n, and before that of a later step begins; killed in between, the stage goes on from the checkpoint before it.
- Where trainer and engine hold the same weights in float32 on a CPU, their log-probs agree to SAME_WEIGHTS_TOLERANCE or the run ends.
  Batches show that only where they are fresh enough; so the orchestrator sends the rollouts of the last evaluation, made by the last
  version alone and after all updates, as a batch that is compared and not trained.
"""

import time
from typing import NoReturn

from orrery.manifest.errors import RunFailed
from orrery.observe.process import RoleContext
from orrery.observe.wind_down import WoundDown
from orrery.trainer.assemble import Rig
from orrery.trainer.heartbeat import io_stall_s, step_stall_s, warms_up
from orrery.trainer.learner import StepResult
from orrery.trainer.loss import COMPONENTS
from orrery.trainer.publish import export
from orrery.trainer.schedule import factor
from orrery.trainer.stage_checkpoints import StageCheckpoints
from orrery.transport import checkpoints
from orrery.transport.canary import canary_tokens
from orrery.transport.rollout_wire import ReceivedBatch

SAME_WEIGHTS_TOLERANCE = 1e-4


def rl(rig: Rig, ctx: RoleContext) -> None:
    """Train all batches that are left, then write `weights/rl`."""
    learner = rig.learner
    first_step, num_steps = learner.step, ctx.manifest.stages.rl.num_steps
    _publish(rig, ctx, is_first=True)
    with StageCheckpoints(ctx, learner, "rl", beside="orchestrator") as saving:
        for step in range(learner.step + 1, num_steps + 1):
            saving.check()
            begin_s = time.monotonic()
            batch = _await_batch(rig, saving, ctx, step, first_step)
            if batch.info.get("compare"):
                _end_checkpoint(rig, saving, _has_checkpoint(rig, ctx, first_step))
                break
            arrived_s = time.monotonic()
            ctx.health.doing(
                "training", step=step, still_s=_still_s(rig, ctx, is_first=step == first_step + 1)
            )
            outcome = _learn(rig, batch, factor(ctx.manifest.trainer.schedule, step, num_steps))
            _check_same_weights(
                ctx, f"step {step}", outcome.metrics["logprob_max_abs_diff_same_weights"]
            )
            publish_s = _publish(rig, ctx)
            is_due = checkpoints.is_due(step, ctx.manifest)
            checkpoint_blocked_s = saving.copy(rig.publisher.record()) if is_due else 0.0
            if rig.world.is_first:
                _record(ctx, step, begin_s, arrived_s, outcome, publish_s, checkpoint_blocked_s)
            if is_due:
                saving.write()
        else:
            batch = _await_batch(rig, saving, ctx, num_steps + 1, first_step)
        _compare(rig, ctx, batch)
        ctx.health.doing("exporting weights", step=learner.step, still_s=io_stall_s(rig.world.size))
        learner.check_weights()  # all of them: not every expert was asked
        export(
            learner.policy,
            rig.world,
            ctx.manifest.model,
            rig.start_weights,
            ctx.run_dir / "weights" / "rl",
        )


def _still_s(rig: Rig, ctx: RoleContext, is_first: bool = False) -> float:
    return step_stall_s(is_first, rig.world.size, warms_up(ctx.manifest.trainer, rig.world.device))


def _await_batch(
    rig: Rig, saving: StageCheckpoints, ctx: RoleContext, step: int, first_step: int
) -> ReceivedBatch:
    """Raises WoundDown where there is none any more; `first_step` is the one that this attempt began at."""
    waiting = ctx.health.waiting(
        f"batch {step} from orchestrator",
        deadline_s=rig.batch_deadline_s,
        behind_s=rig.batch_behind_s,
    )
    with ctx.metrics.span("wait", step=step), waiting:
        batch = rig.receiver.receive(step, rig.batch_deadline_s)
    if batch.info.get("wind_down"):
        _wind_down(rig, saving, _has_checkpoint(rig, ctx, first_step))
    if rig.world.is_first:
        rig.publisher.check(step, batch.info.get("digests"))
    return batch


def _learn(rig: Rig, batch: ReceivedBatch, lr_factor: float) -> StepResult:
    if missing := [name for name in COMPONENTS if name not in batch.totals]:
        raise RunFailed(
            f"batch {batch.step}: announces no count of its {missing[0]} tokens, so its loss cannot be normalised"
        )
    totals = {name: int(batch.totals[name]) for name in COMPONENTS}
    return rig.learner.learn(batch, batch.num_micro_batches, totals, lr_factor)


def _publish(rig: Rig, ctx: RoleContext, is_first: bool = False) -> float:
    """Put out the weights that the learner holds; seconds taken."""
    version, begin_s = rig.learner.step, time.time()
    limit_s = max(rig.publish_still_s, _still_s(rig, ctx, is_first))
    ctx.health.doing(f"publishing version {version}", step=version, still_s=limit_s)
    canary = (
        None
        if ctx.manifest.trainer.mismatch.canary_logprob_difference is None
        else canary_tokens(ctx.manifest)
    )
    published = rig.publisher.publish(
        version, () if canary is None else rig.learner.logprobs(canary)
    )
    end_s = time.time()
    if published is not None:
        ctx.metrics.add_span("publish", begin_s, end_s, step=version, digest=published.digest)
        ctx.log.info("version %d published, weights %s", version, published.digest)
    return end_s - begin_s


def _wind_down(rig: Rig, saving: StageCheckpoints, has_checkpoint: bool) -> NoReturn:
    """Complete the checkpoint of the last step and end the process."""
    _end_checkpoint(rig, saving, has_checkpoint)
    saving.finish()  # other ranks may still use this one's process group
    raise WoundDown(rig.learner.step)


def _has_checkpoint(rig: Rig, ctx: RoleContext, first_step: int) -> bool:
    """Return whether the last step has a checkpoint, computed so that all ranks agree."""
    done = rig.learner.step
    return done == first_step or checkpoints.is_due(done, ctx.manifest)


def _end_checkpoint(rig: Rig, saving: StageCheckpoints, has_checkpoint: bool) -> None:
    """Write a checkpoint of the last step, unless it has one."""
    if not has_checkpoint:
        saving.copy(rig.publisher.record())
        saving.write()


def _compare(rig: Rig, ctx: RoleContext, batch: ReceivedBatch) -> None:
    """The last version in trainer and engines, on rollouts of its own."""
    version = rig.learner.step
    ctx.health.doing(
        "comparing log-probs with the engines", step=version, still_s=_still_s(rig, ctx)
    )
    found, num_tokens = rig.learner.compare(batch)
    if found is None or not batch.info.get("compare"):
        raise RunFailed(
            f"version {version}: none of the rollouts to compare was made by it alone; see logs/orchestrator.0.log"
        )
    if rig.world.is_first:
        ctx.metrics.write(
            None,
            event="compare",
            version=version,
            logprob_max_abs_diff_same_weights=found,
            num_trained_tokens=num_tokens,
        )
        ctx.log.info(
            "version %d: log-probs of trainer and engines differ by at most %.2e on %d tokens",
            version,
            found,
            num_tokens,
        )
    _check_same_weights(ctx, f"version {version}", found)


def _check_same_weights(ctx: RoleContext, what: str, found: float | None) -> None:
    manifest = ctx.manifest
    exact = (
        manifest.hardware.accelerator == "cpu"
        and manifest.trainer.compute_dtype == manifest.inference.dtype == "float32"
    )
    if exact and found is not None and found > SAME_WEIGHTS_TOLERANCE:
        raise RunFailed(
            f"{what}: log-probs of trainer and engine differ by {found:.2e} on the same weights, "
            f"more than {SAME_WEIGHTS_TOLERANCE:g}; they do not compute the same model"
        )


def _record(
    ctx: RoleContext,
    step: int,
    begin_s: float,
    arrived_s: float,
    outcome: StepResult,
    publish_s: float,
    checkpoint_blocked_s: float,
) -> None:
    end_s = time.monotonic()
    ctx.metrics.add_span("forward_backward", *outcome.forward_backward, step=step)
    ctx.metrics.add_span("optimizer", *outcome.optimizer, step=step)
    wait_s = arrived_s - begin_s + outcome.wait_s
    ctx.metrics.write(
        step,
        **outcome.metrics,
        step_time_s=end_s - begin_s,
        wait_s=wait_s,
        forward_backward_s=outcome.forward_backward[1]
        - outcome.forward_backward[0]
        - outcome.wait_s,
        optimizer_s=outcome.optimizer[1] - outcome.optimizer[0],
        publish_s=publish_s,
        checkpoint_blocked_s=checkpoint_blocked_s,
        tokens_per_s=outcome.metrics["num_tokens"] / (end_s - begin_s),
    )
    ctx.log.info(
        "step %d: loss %.4f, waited %.2f s of %.2f s",
        step,
        outcome.metrics["loss"],
        wait_s,
        end_s - begin_s,
    )
