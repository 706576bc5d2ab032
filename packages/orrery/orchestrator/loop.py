"""Run the RL stage as four asyncio tasks that share one `Scheduler`.

    generate       start rollouts and end slow rollouts
    train          pack batches of rollouts and send them to the trainer
    follow         load new policy versions into the engines and start evaluations
    watch_engines  adapt the limit of concurrent rollouts to the engines' load

At a preemption, `train` makes the orchestrator and all trainer ranks checkpoint the same step.
"""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

from orrery.manifest.errors import RunFailed
from orrery.orchestrator import batching, snapshot
from orrery.orchestrator.dispatch import (
    ENGINE_POLL_S,
    EngineActivity,
    Request,
    TimeoutClassifier,
    poll_engines,
)
from orrery.orchestrator.engines.recovery import RETURN_S
from orrery.orchestrator.rollout import Failed, Notifier, Rollout, RolloutRunner
from orrery.orchestrator.scheduler import EvaluationResult, Scheduler, TrainBatch, record
from orrery.runtime.process_control import Preempted, preemption_requested
from orrery.runtime.role_context import RoleContext
from orrery.runtime.run_directory import rollouts_dir
from orrery.runtime.timing import Pace, scaled
from orrery.wire import checkpoints, columns
from orrery.wire.rendezvous import UPDATE_S
from orrery.wire.rollout_wire import Batch, RolloutSender

TICK_S = 0.5
POLL_S = 0.03
GATHER_S = 0.01  # pause, so that rollouts of a group start together
FIRST_VERSION_S = 600.0
NUM_SAMPLES = 4
MANY_TRUNCATED = 0.5
PREEMPTION_POLL_S = 1.0
TAKE_S = 900.0


class PreemptionWatch:
    def __init__(self, ctx: RoleContext):
        self._ctx, self._next_poll_s = ctx, 0.0
        self.is_requested = False

    def poll(self) -> bool:
        now_s = time.monotonic()
        if not self.is_requested and now_s >= self._next_poll_s:
            self._next_poll_s = now_s + PREEMPTION_POLL_S
            self.is_requested = preemption_requested(self._ctx.run_dir, self._ctx.stage)
        return self.is_requested


async def stop_trainer(ctx: RoleContext, wire: RolloutSender, step: int) -> NoReturn:
    """Stop all trainer ranks after batch `step`, then raise Preempted."""
    ranks = ctx.manifest.trainer.mesh.world_size
    with ctx.health.waiting(f"trainer to wind down after batch {step}", deadline_s=scaled(TAKE_S)):
        await wire.send(Batch(step + 1, [[] for _ in range(ranks)], {}, {"wind_down": True}))
        await wire.drained(scaled(TAKE_S))
    raise Preempted(step)


async def update_engines(
    ctx: RoleContext,
    scheduler: Scheduler,
    runner: RolloutRunner,
    pool: Any,
    watch: Any,
    changed: Notifier,
) -> bool:
    """Load the newest policy version into all engines. Return whether a version was loaded.

    - Cancel stale rollouts first, because a paused engine handles no aborts.
    - Rollouts start when the engines resume. `train` also waits for the canary (test prompt).
    """
    if scheduler.evaluations.pinned is not None:
        return False
    published = watch.latest()
    if published is None or not scheduler.may_update(published.version):
        return False
    version, digest = published.version, published.digest
    scheduler.updating = True
    # Store the digest first: engines may return this version's tokens during the update.
    scheduler.digests[version] = digest
    start_s = time.time()
    await runner.cancel(scheduler.drain())
    drained_s, in_flight = time.time(), scheduler.dispatch.num_in_flight

    def resume() -> None:
        if scheduler.updating:
            scheduler.updated(version)
            scheduler.updating = False
            changed.notify_all()

    manifest = ctx.manifest
    return_s = RETURN_S if manifest.inference.max_restarts else 0.0
    with ctx.health.waiting(
        f"engines to take version {version} (inference)",
        deadline_s=manifest.orchestrator.rollout_timeout_s + scaled(UPDATE_S + return_s),
    ):
        report = await pool.update(published, resume)
    if report is None:
        scheduler.updating = False
        return False
    resume()
    end_s = time.time()
    ctx.metrics.add_span("update", start_s, end_s, version, num_in_flight=in_flight)
    ctx.metrics.write(
        version,
        event="update",
        version=version,
        digest=digest,
        drain_s=drained_s - start_s,
        pause_s=report.paused_s,
        update_s=report.update_s,
        attest_s=report.attest_s,
        num_in_flight=in_flight,
        attested=report.attested,
        canary_s=report.canary_s,
        canary_difference=report.canary_difference,
    )
    text = "version %d (%s) in all engines: %d in flight, paused %.0f ms"
    ctx.log.info(text, version, digest, in_flight, 1000 * report.paused_s)
    return True


class Loop:
    def __init__(
        self,
        ctx: RoleContext,
        scheduler: Scheduler,
        tasks: dict,
        renderer: Any,
        pool: Any,
        watch: Any,
        sender: Any,
    ):
        self.ctx, self.scheduler, self.pool, self.sender = ctx, scheduler, pool, sender
        self.manifest = scheduler.manifest
        self.temperature = self.manifest.orchestrator.sampling.temperature
        self.changed = Notifier()
        callbacks = self._ended, self._may_be_last
        self.runner = RolloutRunner(self.manifest, tasks, renderer, pool, *callbacks)
        self.timeouts = TimeoutClassifier(self.manifest.orchestrator.rollout_timeout_s)
        self.watch = watch
        self.activity = EngineActivity(ctx.metrics.add_span)
        self._pace = Pace(ENGINE_POLL_S, time.monotonic())
        self._evaluation: EvaluationResult | None = None
        self._reported: str | None = None
        self._has_warned = False
        self._preemption = PreemptionWatch(ctx)
        # step from which the run resumed, or 0
        self._first_step = scheduler.clock.next_batch - 1

    async def run(self) -> None:
        """Run until the last batch is trained and evaluated, or raise Preempted."""
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
            self.pool.check()
            now_s = time.monotonic()
            expired = self.scheduler.expired(now_s, self.pool.is_serving)
            self.runner.end_expired(expired, self.timeouts, now_s)
            if not self._preemption.is_requested and self.pool.is_serving:
                self.runner.start(self.scheduler.start(time.monotonic()))
            if not self._is_routed:
                self.activity.observe(0, self.runner.num_running, time.time())
            self._report_health()
            await self.changed.wait(TICK_S)
            await asyncio.sleep(GATHER_S)

    async def train(self) -> None:
        scheduler = self.scheduler
        while not scheduler.clock.all_batches_taken:
            if self._preemption.poll():
                await self._end_preempted()
            scheduler.wanted = await self.sender.wanted()
            start_s = time.time()
            # An engine's log-probs may be wrong until it passes the canary check.
            batch = None if self.pool.is_proving else scheduler.take_batch()
            if batch is None:
                await self.changed.wait(POLL_S)
                continue
            self.ctx.metrics.add_span("batch", start_s, time.time(), batch.step)
            is_due = checkpoints.is_due(batch.step, self.manifest)
            kept = scheduler.snapshot() if is_due else None
            row = batching.row(batch, self.manifest, time.monotonic())
            self.changed.notify_all()
            if kept is not None:
                where = self.ctx.run_dir, batch.step, self.ctx.attempt
                await asyncio.to_thread(snapshot.write, *where, kept, self.temperature)
            await self._send(batch, row)
        await self.runner.cancel(scheduler.end_training())

    async def follow(self) -> None:
        while not self.scheduler.done:
            updating = self.ctx, self.scheduler, self.runner, self.pool, self.watch, self.changed
            if await update_engines(*updating):
                self.changed.notify_all()  # `train` may now take batches
            if self.scheduler.begin_evaluation(time.time()):
                self.changed.notify_all()
            await asyncio.sleep(POLL_S)  # pause, because each pass reads files

    async def watch_engines(self) -> None:
        scheduler = self.scheduler
        while not scheduler.done:
            await asyncio.sleep(ENGINE_POLL_S)
            if scheduler.updating:
                continue
            admission = scheduler.dispatch.admission
            loads = await poll_engines(self.ctx, self.pool, admission, self._pace)
            self.timeouts.observe(loads)
            for index, load in loads.items() if self._is_routed else ():
                self.activity.observe(index, load.running + load.waiting, time.time())
            self.changed.notify_all()

    def _ended(self, request: Request, outcome: Rollout | Failed) -> None:
        if isinstance(outcome, Failed):
            outcome.warn(self.ctx.log, request.name)
        result = self.scheduler.ended(request, outcome, time.time())
        if result is not None:
            self._record(result)
        self.changed.notify_all()

    def _record(self, result: EvaluationResult) -> None:
        version, num_batches = result.version, self.scheduler.clock.num_batches
        if self.scheduler.stop_early(result):
            num_batches = self.scheduler.clock.num_batches
            stop_at = self.manifest.orchestrator.evaluation.stop_at
            self.ctx.log.info(
                "held-out reward %.3f of version %d has reached orchestrator.evaluation.stop_at "
                "%g: batch %d is the last",
                result.reward_mean,
                version,
                stop_at,
                num_batches,
            )
        if version == num_batches:
            self._evaluation = result
        digest = self.scheduler.digests[version]
        record(self.ctx, result, f"evaluation of version {version}", digest=digest)

    async def _send(self, batch: TrainBatch, row: dict) -> None:
        step, scheduler = batch.step, self.scheduler
        documents = [batching.document(rollout, self.temperature) for rollout in batch.rollouts]
        digests = batching.digests(batch.rollouts, scheduler.digests)
        info = {"digests": digests}
        with self.ctx.metrics.span("pack", step):
            packed = await asyncio.to_thread(batching.packed, step, documents, self.manifest, info)
        # Write metrics before `send`: a run that resumes after this batch does not write them.
        self.ctx.metrics.write(
            step,
            **row,
            version=max(map(int, digests)),
            digests=digests,
            num_in_flight=scheduler.dispatch.num_in_flight,
            num_queued_rollouts=scheduler.buffer.num_queued,
            dropped=dict(scheduler.buffer.dropped),
        )
        self._warn_of_little_signal(step, row)
        await asyncio.to_thread(self._keep, batch, documents, digests)
        with (
            self.ctx.metrics.span("send", step),
            self.ctx.health.waiting(f"the trainer to take batch {step}"),
        ):
            await self.sender.send(packed)
        text = "batch %d sent: reward %.3f, staleness %.2f"
        self.ctx.log.info(text, step, row["reward_mean"], row["staleness_mean"])

    def _warn_of_little_signal(self, step: int, row: dict) -> None:
        if self._has_warned or 2 * row["num_without_signal"] <= row["num_sampled"]:
            return
        self._has_warned = True
        advice = (
            "make the task harder or easier, raise orchestrator.algorithm.group_size, or end RL at "
            "a held-out reward (orchestrator.evaluation.stop_at)"
        )
        if row["reward_mean"] == 0:
            advice = "the mean reward is 0; make the task easier, or begin with SFT (stages.sft)"
        if row["truncated_share"] >= MANY_TRUNCATED:
            turn = self.manifest.orchestrator.sampling.max_tokens_per_turn
            advice = (
                f"{row['truncated_share']:.0%} of the replies were cut off at a length limit; set "
                f"orchestrator.sampling.max_tokens_per_turn ({turn}) to {4 * turn}, and raise "
                f"inference.max_model_len_tokens (in Jsonnet context_tokens) by {3 * turn}"
            )
        self.ctx.log.warning(
            "batch %d: %d of %d sampled rollouts carry no signal, as all rewards of their group "
            "are equal; %s",
            step,
            row["num_without_signal"],
            row["num_sampled"],
            advice,
        )

    async def _end_preempted(self) -> NoReturn:
        step = self.scheduler.clock.next_batch - 1
        with self.ctx.health.waiting(f"trainer to ask for batch {step + 1} before it winds down"):
            await self.sender.wanted(step + 1)
        await self._write_now(step)
        await stop_trainer(self.ctx, self.sender, step)

    async def _write_now(self, step: int) -> None:
        if step:
            where, kept = (self.ctx.run_dir, step, self.ctx.attempt), self.scheduler.snapshot()
            is_resumed = step == self._first_step
            await asyncio.to_thread(snapshot.write_now, *where, kept, self.temperature, is_resumed)

    def _may_be_last(self, version: int) -> bool:
        has_stop = self.manifest.orchestrator.evaluation.stop_at is not None
        return has_stop or version == self.scheduler.clock.num_batches

    async def _send_comparison(self) -> None:
        evaluation = self._evaluation
        assert evaluation is not None and evaluation.version == self.scheduler.clock.num_batches
        version, step = evaluation.version, evaluation.version + 1
        if not evaluation.rollouts:
            raise RunFailed(
                f"evaluation of version {version}: every rollout timed out, so no log-prob can be "
                "compared; raise orchestrator.rollout_timeout_s"
            )
        if self.scheduler.stopped_early:
            await self._keep_early_end(evaluation)
        compared = [replace(rollout, advantage=0.0) for rollout in evaluation.rollouts]
        documents = [batching.document(rollout, self.temperature) for rollout in compared]
        info = {"compare": True, "digests": batching.digests(compared, self.scheduler.digests)}
        with (
            self.ctx.metrics.span("send", step),
            self.ctx.health.waiting("the trainer to compare log-probs"),
        ):
            packed = await asyncio.to_thread(batching.packed, step, documents, self.manifest, info)
            await self.sender.send(packed)

    async def _keep_early_end(self, evaluation: EvaluationResult) -> None:
        step = evaluation.version
        await self._write_now(step)
        self.ctx.metrics.write(
            step,
            event="stopped_early",
            version=step,
            reward_mean=evaluation.reward_mean,
            num_steps=self.manifest.stages.rl.num_steps,
            stop_at=self.manifest.orchestrator.evaluation.stop_at,
        )

    def _keep(self, batch: TrainBatch, documents: list, digests: dict[str, str]) -> None:
        run_dir, step = self.ctx.run_dir, batch.step
        columns.write_batch(run_dir, step, documents, digests=digests)
        columns.prune_batches(run_dir, step, self.manifest.orchestrator.keep_batches)
        lines = [
            batching.sample(
                rollout,
                step=step,
                attempt=self.ctx.attempt,
                version=rollout.dispatch_version,
                task=self.manifest.tasks.train[rollout.task_index].name,
                group=rollout.group_id,
                advantage=rollout.advantage,
            )
            for rollout in batch.rollouts[:NUM_SAMPLES]
        ]
        batching.append_samples(rollouts_dir(run_dir) / "samples.jsonl", lines)

    @property
    def _is_routed(self) -> bool:
        return self.manifest.inference.num_replicas > 1

    def _report_health(self) -> None:
        clock = self.scheduler.clock
        step = min(clock.next_batch, clock.num_batches)
        waits, deadline_s = None, None
        if self._preemption.is_requested:
            doing = "winding down"
        elif clock.version < 0:
            doing, waits = "starting", "the first weights from trainer"
            deadline_s = scaled(FIRST_VERSION_S)
        elif self.scheduler.dispatch.num_in_flight:
            doing = f"generating for batch {step}"
            if clock.all_batches_taken:
                doing = f"evaluating version {clock.version}"
        elif clock.all_batches_taken:
            doing, waits = "ending", f"version {clock.num_batches} from trainer"
        elif self.scheduler.buffer.has_batch:
            doing, waits = f"holding batch {step}", f"trainer to ask for batch {clock.next_batch}"
        else:
            doing, waits = f"collecting batch {step}", f"version {clock.version + 1} from trainer"
        report = f"{doing}/{waits}"
        if report == self._reported:
            return
        self._reported = report
        self._waits.close()
        self.ctx.health.doing(doing, step=step)
        if waits is not None:
            self._waits.enter_context(self.ctx.health.waiting(waits, deadline_s=deadline_s))
