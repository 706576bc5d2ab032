"""Assemble: from the manifest and the other roles' addresses to what a stage runs."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from orrery.manifest.plan import stage
from orrery.manifest.schema import Manifest
from orrery.observe.deadline import scaled
from orrery.observe.wind_down import WoundDown
from orrery.orchestrator import snapshot
from orrery.orchestrator.beside import Beside
from orrery.orchestrator.loop import Loop
from orrery.orchestrator.state import State
from orrery.orchestrator.winding_down import Request as WindDownRequest
from orrery.tasks import make
from orrery.tasks.chat import Renderer
from orrery.transport import checkpoints, rendezvous
from orrery.transport.canary import Canary
from orrery.transport.fleet import EngineFleet
from orrery.transport.rollout_wire import RolloutSender, make_sender
from orrery.transport.token import run_token
from orrery.transport.weight_wire import make_watch, served_model

T = TypeVar("T")

READ_S = 1800.0  # to read data sets and a checkpoint from a shared file system; scaled
SERVERS_START_S = 600.0  # vLLM imports and compiles for minutes on a busy machine


async def fleet(me: Any) -> EngineFleet:
    """A client of every engine of this stage, behind the router where there is one; waits until all listen.

    Raises WoundDown, at the step that the stage begins with, where it is asked to wind down meanwhile.
    """
    inference = me.manifest.inference
    engines = await _endpoints(me, "inference", inference.num_replicas)
    router_url = None
    if inference.router.kind != "none":
        router_url = (await _endpoints(me, "router", 1))[0].url
    return EngineFleet(
        [engine.url for engine in engines],
        router_url,
        run_token(),
        restarting=me if inference.max_restarts else None,
        incarnations=[engine.incarnation for engine in engines],
        handovers=[engine.info for engine in engines[: inference.prefill_replicas]],
        model=served_model(me.manifest, me.stage),
        canary=Canary.of(me.manifest),
    )


async def _endpoints(me: Any, role: str, count: int) -> list[rendezvous.Endpoint]:
    """Those of servers that are starting; looks for them in a thread, which ends once nobody waits for it any more."""
    request, is_left = WindDownRequest(me), threading.Event()

    def end_early() -> None:
        if (
            is_left.is_set()
        ):  # the loop's end waits for its threads: SIGTERM would wait for the servers
            raise asyncio.CancelledError
        if request.look():
            raise WoundDown(newest.step if (newest := checkpoints.latest(me.run_dir)) else 0)

    try:
        return await asyncio.to_thread(
            rendezvous.await_endpoints, me, role, count, scaled(SERVERS_START_S), end_early
        )
    finally:
        is_left.set()


def tasks(manifest: Manifest) -> dict[str, list]:
    """The tasks by purpose, in the manifest's order."""
    return {
        "train": [make(use) for use in manifest.tasks.train],
        "evaluation": [make(use) for use in manifest.tasks.evaluation],
    }


def policy_dir(me: Any, *stages: str) -> Any:
    """The weights folder of the first of `stages` that this run has."""
    names = [name for name in stages if name != "sft" or me.manifest.stages.sft is not None]
    return me.run_dir / "weights" / names[0]


def renderer(me: Any, *stages: str) -> Renderer:
    """The chat format of that folder, held to the model's vocabulary: an engine has no row for a token beyond it."""
    return Renderer(policy_dir(me, *stages), me.manifest.model.vocab_size)


def sender(me: Any) -> RolloutSender:
    """The batch wire's end, published for the trainer's ranks. Inside the event loop: it serves there."""
    wire = make_sender(
        me.manifest.transport.rollouts,
        me.run_dir,
        me.host,
        me.port,
        me.manifest.trainer.mesh.world_size,
    )
    rendezvous.publish(me, wire.url)
    return wire


def state(me: Any) -> State:
    """A fresh state, or the one of the newest complete checkpoint; what earlier attempts left incomplete is removed."""
    # Safe here: every file of a new checkpoint comes after our next cut.
    checkpoints.discard_incomplete(me.run_dir)
    if removed := checkpoints.discard_all(
        me.run_dir, "sft"
    ):  # that stage is done, and all that is wanted of it is `weights/sft`
        me.log.info(
            "checkpoints of sft, which is done, are removed: steps %s", ", ".join(map(str, removed))
        )
    newest = checkpoints.latest(me.run_dir)
    if newest is None:
        return State(me.manifest)
    step = newest.step
    resumed = State(
        me.manifest, snapshot.read(checkpoints.checkpoint_dir(me.run_dir, *newest), step)
    )
    me.log.info(
        "resuming after step %d: %d rollouts queued, %d groups to redo",
        step,
        resumed.sink.num_queued,
        len(resumed.source.again),
    )
    return resumed


async def reading(me: Any, read: Callable[[], T]) -> T:
    """Return `read()`, run in a thread: it may take minutes, and the event loop must turn."""
    with me.health.waiting(
        "tasks, their data and checkpoints to be read", deadline_s=scaled(READ_S)
    ):
        return await Beside("assemble")(read)


async def loop(me: Any, engines: EngineFleet, wire: RolloutSender) -> Loop:
    """The RL stage."""
    begin, played, chat = await reading(
        me, lambda: (state(me), tasks(me.manifest), renderer(me, "sft", "init"))
    )
    watch = make_watch(
        me.manifest.transport.weights,
        me.run_dir,
        me.attempt,
        stage(me.manifest, me.stage).num_nodes,
    )
    return Loop(me, begin, played, chat, engines, watch, wire)
