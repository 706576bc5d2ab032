"""Assemble: from the manifest and the other roles' addresses to what a stage runs."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from orrery.manifest.plan import stage
from orrery.manifest.schema import Manifest
from orrery.observe.deadline import scaled
from orrery.observe.process import RoleContext
from orrery.observe.wind_down import WoundDown
from orrery.orchestrator import snapshot
from orrery.orchestrator.concurrency import WorkerThread
from orrery.orchestrator.engines.pool import EnginePool
from orrery.orchestrator.engines.update import Canary
from orrery.orchestrator.loop import Loop
from orrery.orchestrator.preemption import PreemptionWatch
from orrery.orchestrator.scheduler import Scheduler
from orrery.tasks import make
from orrery.tasks.chat import Renderer
from orrery.transport import checkpoints, rendezvous
from orrery.transport.rollout_wire import RolloutSender, make_sender
from orrery.transport.token import run_token
from orrery.transport.weight_wire import make_watch, served_model

T = TypeVar("T")

READ_S = 1800.0  # to read data sets and a checkpoint from a shared file system; scaled
SERVERS_START_S = 600.0  # vLLM imports and compiles for minutes on a busy machine


async def fleet(ctx: RoleContext) -> EnginePool:
    """A client of every engine of this stage, behind the router where there is one; waits until all listen.

    Raises WoundDown, at the step that the stage begins with, where it is asked to wind down meanwhile.
    """
    inference = ctx.manifest.inference
    engines = await _endpoints(ctx, "inference", inference.num_replicas)
    router_url = None
    if inference.router.kind != "none":
        router_url = (await _endpoints(ctx, "router", 1))[0].url
    return EnginePool(
        [engine.url for engine in engines],
        router_url,
        run_token(),
        restarting=ctx if inference.max_restarts else None,
        incarnations=[engine.incarnation for engine in engines],
        handovers=[engine.info for engine in engines[: inference.prefill_replicas]],
        model=served_model(ctx.manifest, ctx.stage),
        canary=Canary.of(ctx.manifest),
    )


async def _endpoints(ctx: RoleContext, role: str, count: int) -> list[rendezvous.Endpoint]:
    """Those of servers that are starting; looks for them in a thread, which ends once nobody waits for it any more."""
    request, is_left = PreemptionWatch(ctx), threading.Event()

    def end_early() -> None:
        if (
            is_left.is_set()
        ):  # the loop's end waits for its threads: SIGTERM would wait for the servers
            raise asyncio.CancelledError
        if request.poll():
            raise WoundDown(newest.step if (newest := checkpoints.latest(ctx.run_dir)) else 0)

    try:
        return await asyncio.to_thread(
            rendezvous.await_endpoints, ctx, role, count, scaled(SERVERS_START_S), end_early
        )
    finally:
        is_left.set()


def tasks(manifest: Manifest) -> dict[str, list]:
    """The tasks by purpose, in the manifest's order."""
    return {
        "train": [make(use) for use in manifest.tasks.train],
        "evaluation": [make(use) for use in manifest.tasks.evaluation],
    }


def policy_dir(ctx: RoleContext, *stages: str) -> Any:
    """The weights folder of the first of `stages` that this run has."""
    names = [name for name in stages if name != "sft" or ctx.manifest.stages.sft is not None]
    return ctx.run_dir / "weights" / names[0]


def renderer(ctx: RoleContext, *stages: str) -> Renderer:
    """The chat format of that folder, held to the model's vocabulary: an engine has no row for a token beyond it."""
    return Renderer(policy_dir(ctx, *stages), ctx.manifest.model.vocab_size)


def sender(ctx: RoleContext) -> RolloutSender:
    """The batch wire's end, published for the trainer's ranks. Inside the event loop: it serves there."""
    wire = make_sender(
        ctx.manifest.transport.rollouts,
        ctx.run_dir,
        ctx.host,
        ctx.port,
        ctx.manifest.trainer.mesh.world_size,
    )
    rendezvous.publish(ctx, wire.url)
    return wire


def scheduler(ctx: RoleContext) -> Scheduler:
    """A fresh state, or the one of the newest complete checkpoint; what earlier attempts left incomplete is removed."""
    # Safe here: every file of a new checkpoint comes after our next cut.
    checkpoints.discard_incomplete(ctx.run_dir)
    if removed := checkpoints.discard_all(
        ctx.run_dir, "sft"
    ):  # that stage is done, and all that is wanted of it is `weights/sft`
        ctx.log.info(
            "checkpoints of sft, which is done, are removed: steps %s", ", ".join(map(str, removed))
        )
    newest = checkpoints.latest(ctx.run_dir)
    if newest is None:
        return Scheduler(ctx.manifest)
    step = newest.step
    resumed = Scheduler(
        ctx.manifest, snapshot.read(checkpoints.checkpoint_dir(ctx.run_dir, *newest), step)
    )
    ctx.log.info(
        "resuming after step %d: %d rollouts queued, %d groups to redo",
        step,
        resumed.buffer.num_queued,
        len(resumed.source.unfinished),
    )
    return resumed


async def read_in_thread(ctx: RoleContext, read: Callable[[], T]) -> T:
    """Return `read()`, run in a thread: it may take minutes, and the event loop must turn."""
    with ctx.health.waiting(
        "tasks, their data and checkpoints to be read", deadline_s=scaled(READ_S)
    ):
        return await WorkerThread("assemble")(read)


async def loop(ctx: RoleContext, engines: EnginePool, wire: RolloutSender) -> Loop:
    """The RL stage."""
    begin, played, chat = await read_in_thread(
        ctx, lambda: (scheduler(ctx), tasks(ctx.manifest), renderer(ctx, "sft", "init"))
    )
    watch = make_watch(
        ctx.manifest.transport.weights,
        ctx.run_dir,
        ctx.attempt,
        stage(ctx.manifest, ctx.stage).num_nodes,
    )
    return Loop(ctx, begin, played, chat, engines, watch, wire)
