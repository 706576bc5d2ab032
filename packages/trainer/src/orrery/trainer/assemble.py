"""Assembly: from the manifest and this process's place in the run to the objects that the stages work with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from orrery.manifest.plan import stage
from orrery.manifest.schema import Manifest, Model, Optimizer, Trainer
from orrery.models import lora, weights
from orrery.models.hf_tensors import hf_tensors
from orrery.observe.deadline import scaled
from orrery.observe.process import RoleContext
from orrery.observe.wind_down import WoundDown
from orrery.trainer import stage_checkpoints
from orrery.trainer.base import base_sha256
from orrery.trainer.heartbeat import heartbeat, io_stall_s, mark_part, step_stall_s
from orrery.trainer.learner import Learner
from orrery.trainer.mismatch import MismatchGuard
from orrery.trainer.parallel import build_network, build_policy, fsdp
from orrery.trainer.parallel.world import (
    COLLECTIVE_DEADLINE_S,
    World,
    device_for,
    dissolve,
    form,
    meet,
)
from orrery.trainer.policy import Policy
from orrery.trainer.publish import AdapterPublisher, DirectPublisher, Publisher
from orrery.transport.rendezvous import await_endpoints
from orrery.transport.rollout_wire import RolloutReceiver, make_receiver
from orrery.transport.weight_wire import DIRECT_KINDS, check_room, make_publisher, make_source

STEP_DEADLINE_S = 600.0  # for a batch to arrive, beside the time that rollouts may take
ORCHESTRATOR_DEADLINE_S = 900.0  # it publishes its address before it waits for engines, but a big engine may be starting on the same disks


@dataclass(frozen=True)
class Rig:
    """Everything that the RL loop holds."""

    world: World
    learner: Learner
    publisher: Publisher
    receiver: RolloutReceiver
    start_weights: (
        Path  # the folder that the stage started from; its tokenizer files go along with the policy
    )
    batch_deadline_s: float
    batch_behind_s: float  # for which one rank may still wait for a batch that the others have
    publish_still_s: float  # for which publishing, but for the first time, may show no progress


@contextmanager
def assemble_world(ctx: RoleContext) -> Iterator[World]:
    """This rank among the manifest's ranks, with a process group where one is needed.

    A rank that fails leaves the group as it is: nccl's orderly end waits for collectives that other ranks may never come to, and until then
    nobody would learn what has failed.
    """
    trainer = ctx.manifest.trainer
    ctx.health.doing("joining the other ranks")
    device = device_for(ctx.manifest.hardware.accelerator, ctx.index)
    torch.manual_seed(ctx.manifest.seed + ctx.index)
    store = meet(ctx, trainer.mesh.world_size) if fsdp.is_needed(trainer) else None
    with heartbeat(ctx, device):
        with ctx.health.waiting("the other ranks", deadline_s=scaled(COLLECTIVE_DEADLINE_S)):
            world = form(trainer.mesh, ctx.index, device, store)
        try:
            yield world
        except WoundDown:  # all ranks agreed on it
            dissolve(world)
            raise
        dissolve(world)


def assemble_learner(
    ctx: RoleContext, world: World, start: Path, optimizer: Optimizer, max_grad_norm: float
) -> Learner:
    """The policy with the weights of the folder `start`, sharded as the mesh says, and a fresh optimizer."""
    ctx.health.doing("loading weights", still_s=io_stall_s(world.size))
    policy = load_policy(ctx.manifest.model, ctx.manifest.trainer, world, start)
    learner = Learner(policy, world, ctx.manifest.trainer, optimizer, max_grad_norm)
    if ctx.manifest.trainer.lora is not None:
        learner.base_sha256 = base_sha256(ctx.run_dir, ctx.stage, start)
    return learner


def load_policy(model: Model, trainer: Trainer, world: World, start: Path) -> Policy:
    """The policy with the weights of the folder `start`, and fresh adapters where the manifest has some."""
    policy = build_policy(model, trainer, world)
    weights.load(policy.network, start, each=mark_part)
    if trainer.lora is not None:
        lora.initialize(policy.network, trainer.lora.seed)
    return policy


@contextmanager
def assemble_rl(ctx: RoleContext, world: World) -> Iterator[Rig]:
    """The RL stage's rig, at the newest complete checkpoint or at version 0.

    Raises OrreryError, before weights are loaded, where the versions that it will have at once do not fit.
    """
    manifest = ctx.manifest
    if world.is_first:
        _check_room(ctx)
    start = ctx.run_dir / "weights" / ("init" if manifest.stages.sft is None else "sft")
    learner = assemble_learner(
        ctx, world, start, manifest.trainer.optimizer, manifest.trainer.max_grad_norm
    )
    num_nodes = stage(manifest, ctx.stage).num_nodes
    publisher = _publisher(ctx, learner.policy, world, num_nodes)
    learner.before_step = publisher.settle
    learner.guard = MismatchGuard(manifest, world, ctx.log)
    resumed = stage_checkpoints.resume(ctx, learner, "rl")
    if resumed is not None and world.is_first:
        publisher.restore(resumed / "trainer")
    orchestrator = await_endpoints(ctx, "orchestrator", 1, scaled(ORCHESTRATOR_DEADLINE_S))[0]
    receiver = make_receiver(manifest.transport.rollouts, ctx.run_dir, orchestrator.url, ctx.index)
    try:
        deadline_s = scaled(STEP_DEADLINE_S) + 4 * manifest.orchestrator.rollout_timeout_s
        publish_still_s = _publish_still_s(manifest, world, num_nodes)
        yield Rig(
            world,
            learner,
            publisher,
            receiver,
            start,
            deadline_s,
            _batch_behind_s(manifest, world),
            publish_still_s,
        )
    finally:
        receiver.close()
        publisher.close()


def _batch_behind_s(manifest: Manifest, world: World) -> float:
    """A batch is sent to all ranks at once; files may be seen on one node later than on another, whose network may be gone for a while."""
    is_here = (
        world.size <= manifest.hardware.devices_per_node and manifest.transport.rollouts != "files"
    )
    return step_stall_s(False, world.size) if is_here else io_stall_s(world.size)


def _publish_still_s(manifest: Manifest, world: World, num_nodes: int) -> float:
    """On one node versions are gathered, collective by collective, into shared memory; on several one tensor may fill a file.

    On a direct wire ranks meet in a store, where rank 0 says by name who does not come (`weight_wire.meeting.MEET_S`): that comes first.
    """
    is_gathered_here = manifest.transport.weights not in DIRECT_KINDS and num_nodes == 1
    return step_stall_s(False, world.size) if is_gathered_here else io_stall_s(world.size)


def _publisher(ctx: RoleContext, policy: Policy, world: World, num_nodes: int) -> Publisher:
    kind, engine_dtype = (
        ctx.manifest.transport.weights,
        getattr(torch, ctx.manifest.inference.dtype),
    )
    if kind in DIRECT_KINDS:
        source = make_source(
            kind,
            ctx.run_dir,
            ctx.attempt,
            num_nodes,
            ctx.host,
            world.rank,
            world.size,
            world.device,
        )
        return DirectPublisher(policy, source, engine_dtype, ctx)
    wire = (
        make_publisher(kind, ctx.run_dir, ctx.attempt, num_nodes, _num_kept(ctx.manifest))
        if world.is_first
        else None
    )
    return (
        AdapterPublisher(policy, wire, engine_dtype)
        if kind == "adapters"
        else Publisher(policy, wire)
    )


def _num_kept(manifest: Manifest) -> int:
    """While engines load version v, a batch may be in training, `max_batches_ahead` cut and one more queued: the versions after v."""
    return manifest.orchestrator.max_batches_ahead + 3


def _check_room(ctx: RoleContext) -> None:
    """Of whole weights; adapters are small."""
    manifest = ctx.manifest
    if manifest.transport.weights != "files":
        return
    version_bytes = sum(
        hf.num_bytes for hf in hf_tensors(build_network(manifest.model, manifest.trainer, "meta"))
    )
    keep = min(_num_kept(manifest), manifest.stages.rl.num_steps)
    check_room(ctx.run_dir, stage(manifest, ctx.stage).num_nodes, keep, version_bytes)
