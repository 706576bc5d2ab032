"""Build a stage's objects: engine pool, tasks, sender, scheduler and loop."""

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from orrery.elastic.types import read_place
from orrery.manifest.plan import stage
from orrery.manifest.schema import Manifest
from orrery.orchestrator import snapshot
from orrery.orchestrator.engines.client import Canary
from orrery.orchestrator.engines.pool import EnginePool
from orrery.orchestrator.guests.host import GuestHost
from orrery.orchestrator.loop import Loop, PreemptionWatch
from orrery.orchestrator.rollout import WorkerThread
from orrery.orchestrator.scheduler import Scheduler
from orrery.runtime.network import run_token
from orrery.runtime.process_control import Preempted
from orrery.runtime.role_context import RoleContext
from orrery.runtime.run_directory import weights_path
from orrery.runtime.timing import scaled
from orrery.tasks import make
from orrery.tasks.chat import Renderer
from orrery.wire import checkpoints, rendezvous
from orrery.wire.rollout_wire import RolloutSender
from orrery.wire.weight_wire import DIRECT_KINDS, WeightWatch, served_model, weight_dir
from orrery.wire.weight_wire.leases import LeaseClient

T = TypeVar("T")

READ_S = 1800.0
SERVERS_START_S = 600.0


async def engine_pool(ctx: RoleContext, leases: LeaseClient | None = None) -> EnginePool:
    """Wait until the engines and the router listen. Return their pool.

    At a preemption, raise Preempted with the newest checkpoint's step, or 0.
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
        leases=leases,
        max_samples=inference.max_num_sequences,
        num_ranks=[inference.of_engine(i).data_parallel for i in range(inference.num_replicas)],
        max_local_prefill_tokens=inference.max_local_prefill_tokens,
    )


@asynccontextmanager
async def guests(ctx: RoleContext, pool: EnginePool) -> AsyncIterator[None]:
    """Accept guests (engines of other sites) in the `with` body."""
    if ctx.manifest.orchestrator.guests is None:
        yield
        return
    async with GuestHost(ctx) as host:
        pool.guests = host.pool
        yield


async def _endpoints(ctx: RoleContext, role: str, count: int) -> list[rendezvous.Endpoint]:
    request, is_left = PreemptionWatch(ctx), threading.Event()

    def end_early() -> None:
        if is_left.is_set():
            raise asyncio.CancelledError
        if request.poll():
            raise Preempted(newest.step if (newest := checkpoints.latest(ctx.run_dir)) else 0)

    try:
        return await asyncio.to_thread(
            rendezvous.await_endpoints, ctx, role, count, scaled(SERVERS_START_S), end_early
        )
    finally:
        is_left.set()


def tasks(manifest: Manifest) -> dict[str, list]:
    return {
        "train": [make(use) for use in manifest.tasks.train],
        "evaluation": [make(use) for use in manifest.tasks.evaluation],
    }


def policy_dir(ctx: RoleContext, *stages: str) -> Any:
    names = [name for name in stages if name != "sft" or ctx.manifest.stages.sft is not None]
    return weights_path(ctx.run_dir, names[0])


def renderer(ctx: RoleContext, *stages: str) -> Renderer:
    return Renderer(policy_dir(ctx, *stages), ctx.manifest.model.vocab_size)


def sender(ctx: RoleContext) -> RolloutSender:
    wire = RolloutSender(ctx.host, ctx.port, ctx.manifest.trainer.mesh.world_size)
    rendezvous.publish(ctx, wire.url)
    return wire


def leases(ctx: RoleContext, wire: RolloutSender) -> LeaseClient | None:
    if ctx.manifest.transport.weights not in DIRECT_KINDS:
        return None
    client = LeaseClient.over(wire.control)
    wire.control.start()
    return client


def scheduler(ctx: RoleContext) -> Scheduler:
    """Return a scheduler, resumed from the newest checkpoint if any.

    Remove incomplete checkpoints and SFT's.
    """
    # Safe, because the trainer saves no checkpoint before its first batch.
    checkpoints.discard_incomplete(ctx.run_dir)
    if removed := checkpoints.discard_all(ctx.run_dir, "sft"):
        steps = ", ".join(map(str, removed))
        ctx.log.info("removed checkpoints of the finished stage sft: steps %s", steps)
    newest = checkpoints.latest(ctx.run_dir)
    first_problem = _first_problem(ctx)
    if newest is None:
        return Scheduler(ctx.manifest, first_problem=first_problem)
    step, folder = newest.step, checkpoints.checkpoint_dir(ctx.run_dir, *newest)
    resumed = Scheduler(ctx.manifest, snapshot.read(folder, step), first_problem)
    num_queued, num_groups = resumed.buffer.num_queued, len(resumed.source.unfinished)
    text = "resuming after step %d: %d rollouts queued, %d groups to redo"
    ctx.log.info(text, step, num_queued, num_groups)
    return resumed


def _first_problem(ctx: RoleContext) -> int:
    """Return the first problem's index. It differs between sites of an elastic run."""
    if ctx.manifest.trainer.elastic is None:
        return 0
    return zlib.crc32(read_place(ctx.run_dir).name.encode()) << 20


async def read_in_thread(ctx: RoleContext, read: Callable[[], T]) -> T:
    waits_for = "tasks, their data and checkpoints to be read"
    with ctx.health.waiting(waits_for, deadline_s=scaled(READ_S)):
        return await WorkerThread("assemble")(read)


async def loop(ctx: RoleContext, engines: EnginePool, wire: RolloutSender) -> Loop:
    start, built, chat = await read_in_thread(
        ctx, lambda: (scheduler(ctx), tasks(ctx.manifest), renderer(ctx, "sft", "init"))
    )
    num_nodes = stage(ctx.manifest, ctx.stage).num_nodes
    watch = WeightWatch(weight_dir(ctx.run_dir, ctx.attempt, num_nodes))
    return Loop(ctx, start, built, chat, engines, watch, wire)
