"""The loop: rollouts go in, batches go out, new weights come back. All of it meets in `Scheduler`; here are its three activities.

    generate   permits become rollouts; each ends finished, failed or dropped
    train      as soon as the trainer is near enough: cut a batch, keep what a checkpoint needs, pack it, write it down, send it
    follow     new versions go into the engines; at some of them the policy is evaluated

Asked to wind down (`orrery.observe.wind_down`), `train` waits until the trainer has done all that it was sent, keeps the state of then,
sends a batch that says so, and ends the stage; after the last cut it takes no notice, since the stage is nearly done.

A stage ends early, as a success, once a held-out reward has reached `evaluation.stop_at`. No
further batch is cut then.

After the last, the trainer gets the last evaluation's rollouts once more: one version made them alone, so it can compare log-probs.

They run side by side in one event loop and share nothing but the state, which only changes between two awaits.
"""

import asyncio
import time
from contextlib import ExitStack
from typing import Any, NoReturn

from orrery.manifest.errors import RunFailed
from orrery.observe.deadline import scaled
from orrery.observe.pace import Pace
from orrery.observe.process import RoleContext
from orrery.orchestrator import batching, samples, snapshot
from orrery.orchestrator.activity import EngineActivity
from orrery.orchestrator.buffer import Sample
from orrery.orchestrator.concurrency import Notifier
from orrery.orchestrator.engine_load import ENGINE_POLL_S, poll_engines
from orrery.orchestrator.evaluation import EvaluationResult, describe_counts
from orrery.orchestrator.preemption import PreemptionWatch, stop_trainer
from orrery.orchestrator.requests import Request
from orrery.orchestrator.rollout import Rollout
from orrery.orchestrator.runner import RolloutRunner
from orrery.orchestrator.scheduler import Scheduler, TrainBatch
from orrery.orchestrator.timeouts import TimeoutClassifier
from orrery.orchestrator.updates import Updates
from orrery.transport import checkpoints, rollout_store

TICK_S = 0.5  # timeouts of rollouts are this precise
POLL_S = 0.03  # how often publications are looked for
FIRST_VERSION_S = 600.0  # the trainer's start
NUM_SAMPLES = 4  # decoded rollouts a batch


class Loop:
    """One RL stage."""

    def __init__(
        self,
        ctx: RoleContext,
        scheduler: Scheduler,
        tasks: dict,
        renderer: Any,
        fleet: Any,
        watch: Any,
        sender: Any,
    ):
        self.ctx, self.scheduler, self.fleet, self.sender = ctx, scheduler, fleet, sender
        self.manifest = scheduler.manifest
        self.changed = Notifier()
        self.runner = RolloutRunner(
            self.manifest, tasks, renderer, fleet, self._finished, self._failed, self._may_be_last
        )
        self.overdue = TimeoutClassifier(self.manifest.orchestrator.rollout_timeout_s)
        self.updates = Updates(ctx, scheduler, self.runner, fleet, watch)
        self.activity = EngineActivity(ctx.metrics.add_span)
        self._pace = Pace(ENGINE_POLL_S, time.monotonic())
        self._evaluation: EvaluationResult | None = None  # the newest that is finished
        self._said: str | None = None
        self._has_warned = False
        self._preemption = PreemptionWatch(ctx)
        self._first_step = (
            scheduler.clock.next_batch - 1
        )  # the checkpoint that this attempt resumes from, or 0

    async def run(self) -> None:
        """Until the last batch is trained and the policy that it makes is evaluated. Raises WoundDown where it is asked to."""
        activities = [
            asyncio.create_task(each(), name=each.__name__)
            for each in (self.generate, self.train, self.follow, self.watch_engines)
        ]
        try:
            with ExitStack() as waits:
                self._waits = waits
                done, _ = await asyncio.wait(activities, return_when=asyncio.FIRST_EXCEPTION)
                for each in done:
                    each.result()
                await self._send_comparison()
        finally:
            for each in activities:
                each.cancel()
            await asyncio.gather(*activities, return_exceptions=True)
            await self.runner.close()
            self.activity.close(time.time())

    async def generate(self) -> None:
        while not self.scheduler.done:
            self.runner.check()
            self.fleet.check()
            self._end_overdue(time.monotonic())
            if (
                not self._preemption.is_requested and self.fleet.is_serving
            ):  # what is in flight may still end, and is kept if it does
                self.runner.start(self.scheduler.start(time.monotonic()))
            self._observe_own_engine()
            self._say_what_we_wait_for()
            await self.changed.wait(TICK_S)

    async def train(self) -> None:
        while not self.scheduler.clock.all_batches_taken:
            if self._preemption.poll():
                await self._end_early()
            self.scheduler.wanted = await self.sender.wanted()
            start_s = time.time()
            batch = (
                None if self.fleet.is_proving else self.scheduler.take_batch()
            )  # an unproven engine's tokens are not trained
            if batch is None:
                await self.changed.wait(POLL_S)
                continue
            self.ctx.metrics.add_span("cut", start_s, time.time(), batch.step)
            kept = (
                self.scheduler.snapshot() if checkpoints.is_due(batch.step, self.manifest) else None
            )
            row = batching.row(batch, self.manifest, time.monotonic())
            self.changed.notify_all()  # a new batch number may let new groups start
            if kept is not None:
                temperature = self.manifest.orchestrator.sampling.temperature
                await asyncio.to_thread(
                    snapshot.write,
                    self.ctx.run_dir,
                    batch.step,
                    self.ctx.attempt,
                    kept,
                    temperature,
                )
            await self._send(batch, row)
        await self.runner.cancel(self.scheduler.end_training())

    async def follow(self) -> None:
        while not self.scheduler.done:
            if await self.updates.take_newest():
                self.changed.notify_all()
            if self.scheduler.begin_evaluation(time.time()):
                self.changed.notify_all()
            await asyncio.sleep(POLL_S)  # not at every pulse: looking for a publication reads files

    async def watch_engines(self) -> None:
        """What the engines say of themselves; the limit follows them, and the report's activity where a router stands between."""
        while not self.scheduler.done:
            await asyncio.sleep(ENGINE_POLL_S)
            if self.scheduler.updating:  # what is paused says nothing of what fits
                continue
            loads = await poll_engines(
                self.ctx, self.fleet, self.scheduler.dispatch.admission, self._pace
            )
            self.overdue.observe(loads)
            for index, load in loads.items():
                if self._routed:
                    self.activity.observe(index, load.running + load.waiting, time.time())
            self.changed.notify_all()

    # What rollouts come to -------------------------------------------------------------------------------------------

    def _finished(self, request: Request, rollout: Rollout) -> None:
        self._settle(self.scheduler.finished(request, rollout, time.time()))

    def _failed(self, request: Request, reason: str, detail: str) -> None:
        self.ctx.log.warning("rollout %s failed (%s): %s", request.name, reason, detail)
        self._settle(self.scheduler.failed(request, reason, detail, time.time()))

    def _end_overdue(self, now_s: float) -> None:
        expired = self.scheduler.expired(now_s, self.fleet.is_serving)
        for request, reason, detail in self.overdue.reasons(
            expired, self.runner.is_generating, now_s
        ):
            # Drop the request before the engine ends it: a result that still comes is void.
            self._failed(request, reason, detail)
            self.runner.cancel([request])

    def _settle(self, result: EvaluationResult | None) -> None:
        if result and self.scheduler.stop_early(result):
            self.ctx.log.info(
                "held-out reward %.3f of version %d has reached orchestrator.evaluation.stop_at %g: batch %d is the last",
                result.reward_mean, result.version, self.manifest.orchestrator.evaluation.stop_at, self.scheduler.clock.num_batches,
            )  # fmt: skip
        if result and result.version == self.scheduler.clock.num_batches:
            self._evaluation = result  # its rollouts are sent to be compared; others' are not kept
        for row in result.rows if result else ():
            self.ctx.metrics.write(
                result.version,
                event="evaluation",
                digest=self.scheduler.digests[result.version],
                **row,
            )
            self.ctx.metrics.add_span(
                "evaluation", row["start_s"], row["end_s"], result.version, task=row["task"]
            )
            self.ctx.log.info(
                "evaluation of version %d: %s %.3f (%s)",
                result.version,
                row["task"],
                row["reward_mean"],
                describe_counts(row),
            )
        self.changed.notify_all()

    # Sending ---------------------------------------------------------------------------------------------------------

    async def _send(self, batch: TrainBatch, row: dict) -> None:
        step, scheduler = batch.step, self.scheduler
        temperature = self.manifest.orchestrator.sampling.temperature
        documents = [batching.document(sample, temperature) for sample in batch.samples]
        digests = batching.digests(batch.samples, scheduler.digests)
        with self.ctx.metrics.span("pack", step):
            packed = await asyncio.to_thread(
                batching.packed, step, documents, self.manifest, {"digests": digests}
            )
        # Before it is sent: a batch that a checkpoint counts as trained is never cut again, so a kill must find all of this on disk.
        self.ctx.metrics.write(
            step, **row, version=max(map(int, digests)), digests=digests, num_in_flight=scheduler.dispatch.num_in_flight,
            num_queued_rollouts=scheduler.buffer.num_queued, dropped=dict(scheduler.buffer.dropped),
        )  # fmt: skip
        self._warn_of_little_signal(step, row)
        await asyncio.to_thread(self._keep, batch, documents, digests)
        with (
            self.ctx.metrics.span("send", step),
            self.ctx.health.waiting(f"the trainer to take batch {step}"),
        ):
            await self.sender.send(packed)
        self.ctx.log.info(
            "batch %d sent: reward %.3f, staleness %.2f",
            step,
            row["reward_mean"],
            row["staleness_mean"],
        )

    def _warn_of_little_signal(self, step: int, row: dict) -> None:
        """Warn once if most rollouts carry no signal."""
        if self._has_warned or 2 * row["num_without_signal"] <= row["num_sampled"]:
            return
        self._has_warned = True
        self.ctx.log.warning(
            "batch %d: %d of %d sampled rollouts carry no signal, as all rewards of their group are equal; make the task harder or easier, "
            "raise orchestrator.algorithm.group_size, or end RL at a held-out reward (orchestrator.evaluation.stop_at)",
            step, row["num_without_signal"], row["num_sampled"],
        )  # fmt: skip

    async def _end_early(self) -> NoReturn:
        """Wind down at the last batch that was sent."""
        step = self.scheduler.clock.next_batch - 1
        with self.ctx.health.waiting(f"trainer to ask for batch {step + 1}, to wind down"):
            await self.sender.wanted(step + 1)
        await self._write_now(step)
        await stop_trainer(self.ctx, self.sender, step)

    async def _write_now(self, step: int) -> None:
        """Write our half of the checkpoint of `step`, the last batch sent; 0 writes nothing."""
        if step:
            kept, temperature = (
                self.scheduler.snapshot(),
                self.manifest.orchestrator.sampling.temperature,
            )
            is_resumed = step == self._first_step
            await asyncio.to_thread(
                snapshot.write_now,
                self.ctx.run_dir,
                step,
                self.ctx.attempt,
                kept,
                temperature,
                is_resumed,
            )

    def _may_be_last(self, version: int) -> bool:
        """Return whether `version` may prove to be the stage's last once it is evaluated."""
        return (
            version == self.scheduler.clock.num_batches
            or self.manifest.orchestrator.evaluation.stop_at is not None
        )

    async def _send_comparison(self) -> None:
        """What comes after the last batch: rollouts of the last version, to be scored and not trained."""
        evaluation, temperature = self._evaluation, self.manifest.orchestrator.sampling.temperature
        assert evaluation is not None and evaluation.version == self.scheduler.clock.num_batches
        if not evaluation.rollouts:
            raise RunFailed(
                f"evaluation of version {evaluation.version}: every rollout timed out, so no log-prob can be compared; "
                f"raise orchestrator.rollout_timeout_s"
            )
        step = evaluation.version + 1
        if self.scheduler.stopped_early:
            await self._keep_early_end(evaluation)
        compared = [
            Sample(rollout, 0.0, group.group_id, 0, group.task_index, evaluation.version)
            for group, rollout in evaluation.rollouts
        ]
        documents = [batching.document(sample, temperature) for sample in compared]
        info = {"compare": True, "digests": batching.digests(compared, self.scheduler.digests)}
        with (
            self.ctx.metrics.span("send", step),
            self.ctx.health.waiting("the trainer to compare log-probs"),
        ):
            await self.sender.send(
                await asyncio.to_thread(batching.packed, step, documents, self.manifest, info)
            )

    async def _keep_early_end(self, evaluation: EvaluationResult) -> None:
        """Write our half of the last checkpoint, and a row that the stage ends early."""
        step = evaluation.version
        await self._write_now(step)
        self.ctx.metrics.write(
            step, event="stopped_early", version=step, reward_mean=evaluation.reward_mean, num_steps=self.manifest.stages.rl.num_steps,
            stop_at=self.manifest.orchestrator.evaluation.stop_at,
        )  # fmt: skip

    def _keep(self, batch: TrainBatch, documents: list, digests: dict[str, str]) -> None:
        rollout_store.write_batch(self.ctx.run_dir, batch.step, documents, digests=digests)
        rollout_store.prune(self.ctx.run_dir, batch.step, self.manifest.orchestrator.keep_batches)
        samples.append(
            self.ctx.run_dir / "rollouts" / "samples.jsonl",
            (
                samples.line(
                    sample.rollout, step=batch.step, attempt=self.ctx.attempt, version=sample.dispatch_version,
                    task=self.manifest.tasks.train[sample.task_index].name, group=sample.group_id, advantage=sample.advantage,
                )
                for sample in batch.samples[:NUM_SAMPLES]
            ),
        )  # fmt: skip

    # What others see -------------------------------------------------------------------------------------------------

    @property
    def _routed(self) -> bool:
        return self.manifest.inference.num_replicas > 1

    def _observe_own_engine(self) -> None:
        if not self._routed:
            self.activity.observe(0, self.runner.num_running, time.time())

    def _say_what_we_wait_for(self) -> None:
        """Health, when it changes: what we do, or whom we wait for."""
        scheduler, clock = self.scheduler, self.scheduler.clock
        step = min(clock.next_batch, clock.num_batches)
        waits: str | None = None
        deadline_s: float | None = None
        if self._preemption.is_requested:
            doing = "winding down"
        elif clock.version < 0:
            doing, waits, deadline_s = (
                "starting",
                "the first weights from trainer",
                scaled(FIRST_VERSION_S),
            )
        elif scheduler.dispatch.num_in_flight:
            doing = (
                f"generating for batch {step}"
                if not clock.all_batches_taken
                else f"evaluating version {clock.version}"
            )
        elif clock.all_batches_taken:
            doing, waits = "ending", f"version {clock.num_batches} from trainer"
        elif scheduler.buffer.has_batch:
            doing, waits = f"holding batch {step}", f"trainer to ask for batch {clock.next_batch}"
        else:
            doing, waits = f"collecting batch {step}", f"version {clock.version + 1} from trainer"
        said = f"{doing}/{waits}"
        if said == self._said:
            return
        self._said = said
        self._waits.close()
        self.ctx.health.doing(doing, step=step)
        if waits is not None:
            self._waits.enter_context(self.ctx.health.waiting(waits, deadline_s=deadline_s))
