"""Evaluate the policies before and after RL on the same held-out problems and seeds."""

import asyncio
import json
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from orrery.manifest.errors import RunFailed
from orrery.manifest.plan import stage
from orrery.manifest.publish import make_folder, write_atomic
from orrery.orchestrator import assemble, batching
from orrery.orchestrator.dispatch import (
    ENGINE_POLL_S,
    Admission,
    Dispatch,
    Request,
    TimeoutClassifier,
    poll_engines,
)
from orrery.orchestrator.rollout import ENGINE_GONE, Failed, Notifier, Rollout, RolloutRunner
from orrery.orchestrator.scheduler import EvaluationResult, Evaluations, record
from orrery.runtime.role_context import RoleContext
from orrery.runtime.run_directory import done_path, evaluated_path, result_path
from orrery.runtime.timing import Pace
from orrery.wire import checkpoints
from orrery.wire.weight_wire import WeightPublisher, weight_dir

TICK_S = 0.5
COUNTS = ("num_rollouts", "num_failed", "failures", "num_timeouts")


async def run(ctx: RoleContext) -> None:
    num_nodes = stage(ctx.manifest, ctx.stage).num_nodes
    async with await assemble.engine_pool(ctx) as pool:
        publisher = WeightPublisher(weight_dir(ctx.run_dir, ctx.attempt, num_nodes), keep=2)
        try:
            results = await _both(ctx, pool, publisher)
        finally:
            publisher.close()
    _write(ctx, results)


async def _both(ctx: RoleContext, pool: Any, publisher: Any) -> dict[str, EvaluationResult]:
    # RL may end before `num_steps`.
    after = max(checkpoints.steps(ctx.run_dir), default=ctx.manifest.stages.rl.num_steps)
    policies = {
        "before": (0, assemble.policy_dir(ctx, "sft", "init")),
        "after": (after, assemble.policy_dir(ctx, "rl")),
    }
    chat, tasks = await assemble.read_in_thread(
        ctx, lambda: (assemble.renderer(ctx, "rl"), assemble.tasks(ctx.manifest))
    )
    evaluation = EvaluationLoop(ctx, pool, chat, tasks, last_step=after)
    results = {}
    for policy, (version, folder) in policies.items():
        with ctx.metrics.span("update", version):
            published = await asyncio.to_thread(publisher.publish_folder, version, folder)
            if policy == "after":
                check_last(ctx, version, folder, published.digest)
            report = await pool.update(published)
            assert report is not None
        ctx.metrics.write(
            version,
            event="update",
            version=version,
            digest=published.digest,
            drain_s=0.0,
            pause_s=report.paused_s,
            update_s=report.update_s,
            attest_s=report.attest_s,
            num_in_flight=0,
            attested=report.attested,
        )
        ctx.health.doing(f"evaluating the policy {policy} RL")
        results[policy] = await evaluation.run(version)
        about = {"policy": policy, "digest": published.digest}
        record(ctx, results[policy], f"{policy} RL", **about)
    return results


def check_last(ctx: RoleContext, version: int, folder: Path, digest: str) -> None:
    """Raise RunFailed if `folder` does not hold the trainer's last published weights.

    Check only `files` transport without FP8: other digests are not comparable.
    """
    newest = checkpoints.latest(ctx.run_dir)
    comparable = ctx.manifest.transport.weights == "files" and not ctx.manifest.model.fp8
    if not comparable or newest is None or newest.step != version:
        return
    file = checkpoints.checkpoint_dir(ctx.run_dir, *newest) / "trainer" / checkpoints.PUBLISHED
    done = done_path(ctx.run_dir, "rl")
    remedy = f"remove {done} and run rl again, which resumes from the last checkpoint"
    try:
        published = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
        expected = {int(step): text for step, text in published.items()}[version]
    except (OSError, msgspec.MsgspecError, ValueError, KeyError) as error:
        raise RunFailed(
            f"{file}: has no digest of version {version} ({error!r}); {remedy}"
        ) from error
    if digest != expected:
        raise RunFailed(
            f"{folder}: has weights {digest}, but the trainer published {expected} as its last "
            f"version; {remedy}"
        )


class EvaluationLoop:
    def __init__(self, ctx: RoleContext, pool: Any, renderer: Any, tasks: dict, last_step: int):
        manifest = ctx.manifest
        settings, orchestrator = manifest.stages.evaluate, manifest.orchestrator
        self.ctx, self.pool = ctx, pool
        self.timeouts = TimeoutClassifier(orchestrator.rollout_timeout_s)
        self.evaluations = Evaluations(
            manifest.tasks.evaluation,
            max(last_step, 1),
            settings.num_problems,
            settings.rollouts_per_problem,
            last_step,
        )
        max_model_len_tokens = manifest.inference.max_model_len_tokens
        self.dispatch = Dispatch(Admission(orchestrator.admission, max_model_len_tokens))
        self.changed = Notifier()
        self.runner = RolloutRunner(manifest, tasks, renderer, pool, self._ended)
        self.result: EvaluationResult | None = None

    async def run(self, version: int) -> EvaluationResult:
        watching = asyncio.create_task(self._watch_engines())
        try:
            return await self._evaluate(version)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _watch_engines(self) -> None:
        pace, admission = Pace(ENGINE_POLL_S, time.monotonic()), self.dispatch.admission
        while True:
            await asyncio.sleep(ENGINE_POLL_S)
            self.timeouts.observe(await poll_engines(self.ctx, self.pool, admission, pace))
            self.changed.notify_all()

    async def _evaluate(self, version: int) -> EvaluationResult:
        self.result = None
        for group in self.evaluations.begin(version, time.time()):
            self.dispatch.offer(group)
        try:
            while self.result is None:
                self.runner.check()
                self.pool.check()
                now_s, is_serving = time.monotonic(), self.pool.is_serving
                expired = self.dispatch.expired(now_s, self.timeouts.timeout_s, is_serving)
                self.runner.end_expired(expired, self.timeouts, now_s)
                if self.pool.is_serving:
                    self.runner.start(self.dispatch.start(version, time.monotonic()))
                await self.changed.wait(TICK_S)
        finally:
            await self.runner.close()
        return self.result

    def _ended(self, request: Request, outcome: Rollout | Failed) -> None:
        if isinstance(outcome, Failed):
            outcome.warn(self.ctx.log, request.name)
            if outcome.reason == ENGINE_GONE and self.dispatch.restart(request.name):
                self.changed.notify_all()
                return
        if self.dispatch.leave(request.name):
            self.result = self.evaluations.add(request, outcome, time.time()) or self.result
            self.changed.notify_all()


def summary(results: dict[str, EvaluationResult]) -> dict[str, Any]:
    """Return the content of `result.json`: rewards by policy and task.

    Means exclude failed rollouts, except timeouts with reward 0. Requested rollouts weight the
    mean over tasks.
    """
    content: dict[str, Any] = {"tasks": {}}
    for policy, result in results.items():
        failures = sum((Counter(row["failures"]) for row in result.rows), Counter())
        content[policy] = {
            "reward_mean": result.reward_mean,
            "num_rollouts": sum(row["num_rollouts"] for row in result.rows),
            "num_failed": sum(row["num_failed"] for row in result.rows),
            "failures": dict(sorted(failures.items())),
            "num_timeouts": sum(row["num_timeouts"] for row in result.rows),
        }
        for row in result.rows:
            kept = {name: row[name] for name in ("reward_mean", *COUNTS)}
            content["tasks"].setdefault(row["task"], {})[policy] = kept
    return content


def _write(ctx: RoleContext, results: dict[str, EvaluationResult]) -> None:
    uses = ctx.manifest.tasks.evaluation
    lines = [
        batching.sample(
            rollout,
            policy=policy,
            version=result.version,
            task=uses[rollout.task_index].name,
            problem=rollout.problem_index,
        )
        for policy, result in results.items()
        for rollout in result.rollouts
    ]
    batching.write_samples(evaluated_path(ctx.run_dir), lines)
    path = result_path(ctx.run_dir, "evaluate")
    make_folder(path.parent)
    write_atomic(path, (json.dumps(summary(results), indent=2) + "\n").encode())
