"""Train the RL stage. Batch n (from 1) trains version n − 1 and makes version n.

The final batch (marked `compare`) only serves to compare log-probs of trainer and engines. It comes
early if the reward reaches `evaluation.stop_at`.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from orrery.manifest.errors import RunFailed
from orrery.runtime.process_control import Preempted
from orrery.runtime.role_context import RoleContext
from orrery.runtime.run_directory import weights_path
from orrery.trainer.checkpoint_writer import StageCheckpoints
from orrery.trainer.elastic import SiteTraining
from orrery.trainer.export import export_policy
from orrery.trainer.heartbeat import io_stall_s, step_stall_s
from orrery.trainer.learner import Learner, StepResult, learning_rate_factor
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import TOTALS
from orrery.trainer.publish import Publisher
from orrery.wire.rendezvous import canary_tokens
from orrery.wire.rollout_wire import ReceivedBatch, RolloutReceiver

SAME_WEIGHTS_TOLERANCE = 1e-4  # maximum |trainer − engine| of float32 log-probs on CPUs


@dataclass
class RlLoop:
    ctx: RoleContext
    world: World
    learner: Learner
    publisher: Publisher
    receiver: RolloutReceiver
    checkpoints: StageCheckpoints
    batch_deadline_s: float
    batch_behind_s: float  # time limit to receive a batch after another rank did
    publish_still_s: float  # time limit in which a publication makes no progress
    site: SiteTraining | None = None
    start_step: int = field(init=False)  # the resumed checkpoint's step, or 0

    def __post_init__(self) -> None:
        self.start_step = self.learner.step

    def run(self) -> None:
        self.publish(is_first=True)
        with self.checkpoints:
            for step in range(self.start_step + 1, self.num_steps + 1):
                self.checkpoints.check()
                begin_s = time.monotonic()
                batch = self.receive(step)
                if batch.info.get("compare"):
                    self.checkpoint_last_step()
                    break
                wait_s = time.monotonic() - begin_s
                result = self.train(batch)
                publish_s = self.publish()
                is_due = self.checkpoints.is_due(step)
                blocked_s = self.copy_checkpoint() if is_due else 0.0
                self.record(result, begin_s, wait_s, publish_s, blocked_s)
                if is_due:
                    self.checkpoints.write()
            else:
                batch = self.receive(self.num_steps + 1)
            self.compare(batch)
            self.export()

    @property
    def num_steps(self) -> int:
        return self.ctx.manifest.stages.rl.num_steps

    def receive(self, step: int) -> ReceivedBatch:
        """Wait for batch `step`.

        If it is marked `wind_down` (preemption), save a checkpoint and raise Preempted.
        """
        waiting = self.ctx.health.waiting(
            f"batch {step} from orchestrator",
            deadline_s=self.batch_deadline_s,
            behind_s=self.batch_behind_s,
        )
        with self.ctx.metrics.span("wait", step=step), waiting:
            batch = self.receiver.receive(step, self.batch_deadline_s)
        if batch.info.get("wind_down"):
            self.checkpoint_last_step()
            self.checkpoints.finish()
            raise Preempted(self.learner.step)
        if self.world.is_first:
            self.publisher.check(step, batch.info.get("digests"))
        return batch

    def train(self, batch: ReceivedBatch) -> StepResult:
        step = self.learner.step + 1
        is_first = step == self.start_step + 1
        self.ctx.health.doing("training", step=step, still_s=self._step_stall_s(is_first))
        if missing := [name for name in TOTALS if name not in batch.totals]:
            raise RunFailed(
                f"batch {batch.step}: lacks the count of its {missing[0]} tokens, "
                f"so its loss cannot be normalised"
            )
        totals = {name: int(batch.totals[name]) for name in TOTALS}
        schedule = self.ctx.manifest.trainer.schedule
        lr_factor = learning_rate_factor(schedule, step, self.num_steps)
        result = self.learner.learn(batch, batch.num_micro_batches, totals, lr_factor)
        difference = result.metrics["logprob_max_abs_diff_same_weights"]
        self._check_same_weights(f"step {step}", difference)
        if self.site is not None:
            self.site.after_step(result.num_tokens)
        return result

    def publish(self, is_first: bool = False) -> float:
        ctx, version, begin_s = self.ctx, self.learner.step, time.time()
        limit_s = max(self.publish_still_s, self._step_stall_s(is_first))
        ctx.health.doing(f"publishing version {version}", step=version, still_s=limit_s)
        has_canary = ctx.manifest.trainer.mismatch.canary_logprob_difference is not None
        canary = self.learner.logprobs(canary_tokens(ctx.manifest)) if has_canary else ()
        published = self.publisher.publish(version, canary)
        end_s = time.time()
        if published is not None:
            ctx.metrics.add_span("publish", begin_s, end_s, step=version, digest=published.digest)
            ctx.log.info("version %d published, weights %s", version, published.digest)
        return end_s - begin_s

    def copy_checkpoint(self) -> float:
        files = self.publisher.checkpoint_files()
        if self.site is not None:
            files |= self.site.checkpoint_files()
        return self.checkpoints.copy(files)

    def checkpoint_last_step(self) -> None:
        """Write the last step's checkpoint unless it exists. A collective."""
        step = self.learner.step
        if step != self.start_step and not self.checkpoints.is_due(step):
            self.copy_checkpoint()
            self.checkpoints.write()

    def compare(self, batch: ReceivedBatch) -> None:
        """Record the maximum log-prob difference between trainer and engines.

        Raise RunFailed if no rollout is of this version, or if float32 log-probs on CPUs differ.
        """
        ctx, version = self.ctx, self.learner.step
        what = "comparing log-probs with the engines"
        ctx.health.doing(what, step=version, still_s=self._step_stall_s())
        found, num_tokens = self.learner.compare(batch)
        if found is None or not batch.info.get("compare"):
            raise RunFailed(
                f"version {version}: every rollout to compare has tokens of another version; "
                f"see logs/orchestrator.0.log"
            )
        if self.world.is_first:
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
        self._check_same_weights(f"version {version}", found)

    def export(self) -> None:
        ctx = self.ctx
        still_s = io_stall_s(self.world.size)
        ctx.health.doing("exporting weights", step=self.learner.step, still_s=still_s)
        # `compare` cannot see a NaN in an expert that received no token.
        self.learner.check_weights()
        start, made = start_weights(ctx), weights_path(ctx.run_dir, "rl")
        export_policy(self.learner.policy, self.world, ctx.manifest.model, start, made)

    def record(
        self,
        result: StepResult,
        begin_s: float,
        wait_s: float,
        publish_s: float,
        checkpoint_blocked_s: float,
    ) -> None:
        if not self.world.is_first:
            return
        ctx, step, step_time_s = self.ctx, self.learner.step, time.monotonic() - begin_s
        ctx.metrics.add_span("forward_backward", *result.forward_backward, step=step)
        ctx.metrics.add_span("optimizer", *result.optimizer, step=step)
        forward_backward_s, optimizer_s = (
            end_s - start_s for start_s, end_s in (result.forward_backward, result.optimizer)
        )
        wait_s += result.wait_s
        ctx.metrics.write(
            step,
            **result.metrics,
            step_time_s=step_time_s,
            wait_s=wait_s,
            forward_backward_s=forward_backward_s - result.wait_s,
            optimizer_s=optimizer_s,
            publish_s=publish_s,
            checkpoint_blocked_s=checkpoint_blocked_s,
            tokens_per_s=result.num_tokens / step_time_s,
            **_peak(),
        )
        loss = result.metrics["loss"]
        ctx.log.info("step %d: loss %.4f, waited %.2f s of %.2f s", step, loss, wait_s, step_time_s)

    def _step_stall_s(self, is_first: bool = False) -> float:
        return step_stall_s(self.world, self.ctx.manifest.trainer, is_first)

    def _check_same_weights(self, what: str, difference: float | None) -> None:
        manifest = self.ctx.manifest
        dtypes = {manifest.trainer.compute_dtype, manifest.inference.dtype}
        is_exact = manifest.hardware.accelerator == "cpu" and dtypes == {"float32"}
        if is_exact and difference is not None and difference > SAME_WEIGHTS_TOLERANCE:
            raise RunFailed(
                f"{what}: log-probs of trainer and engine differ by {difference:.2e} on the same "
                f"weights, more than {SAME_WEIGHTS_TOLERANCE:g}, so they compute different models"
            )


def _peak() -> dict[str, int]:
    return {"peak_bytes": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {}


def start_weights(ctx: RoleContext) -> Path:
    return weights_path(ctx.run_dir, ctx.manifest.stage_before_rl)
