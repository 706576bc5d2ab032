"""Build a stage's objects from the manifest."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from orrery.manifest.machine import refuse_other_device
from orrery.manifest.plan import stage
from orrery.manifest.schema import Manifest, Model, Optimizer, Trainer
from orrery.models import lora, weights
from orrery.models.weights import hf_tensors
from orrery.runtime.process_control import Preempted
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import scaled
from orrery.trainer.checkpoint import base_sha256
from orrery.trainer.checkpoint_writer import StageCheckpoints, resume
from orrery.trainer.elastic import SiteTraining
from orrery.trainer.heartbeat import heartbeat, io_stall_s, mark_part, step_stall_s
from orrery.trainer.learner import Learner, MismatchGuard
from orrery.trainer.loop import RlLoop, start_weights
from orrery.trainer.parallel import build_network, build_policy
from orrery.trainer.parallel.world import (
    COLLECTIVE_DEADLINE_S,
    World,
    destroy_world,
    device_for,
    init_world,
    open_rendezvous,
)
from orrery.trainer.policy import Policy
from orrery.trainer.publish import AdapterPublisher, DirectPublisher, Publisher
from orrery.trainer.site_weights import fresh_outer
from orrery.wire.rendezvous import await_endpoints
from orrery.wire.rollout_wire import RolloutReceiver
from orrery.wire.weight_wire import (
    DIRECT_KINDS,
    WeightPublisher,
    check_room,
    make_weight_sender,
    weight_dir,
)

STEP_DEADLINE_S = 600.0
SPARE_WAVES = 4  # waves allowed for restarts, weight updates and stale rollouts
ORCHESTRATOR_DEADLINE_S = 900.0


@contextmanager
def assemble_world(ctx: RoleContext) -> Iterator[World]:
    """Join the process group and yield its `World`.

    After an error the group stays open, because closing may hang.
    """
    trainer = ctx.manifest.trainer
    ctx.health.doing("joining the other ranks")
    device = device_for(ctx.manifest.hardware.accelerator, ctx.index)
    if device.type == "cuda":  # the launcher checked only its own node's GPU
        refuse_other_device(ctx.manifest, torch.cuda.get_device_name(device))
    torch.manual_seed(ctx.manifest.seed + ctx.index)
    store = open_rendezvous(ctx, trainer.mesh.world_size) if trainer.needs_fsdp else None
    with heartbeat(ctx, device):
        with ctx.health.waiting("the other ranks", deadline_s=scaled(COLLECTIVE_DEADLINE_S)):
            world = init_world(trainer.mesh, ctx.index, device, store)
        try:
            yield world
        except Preempted:  # raised on all ranks at the same step, so closing cannot hang
            destroy_world(world)
            raise
        destroy_world(world)
        for wait in world.at_end:
            wait()


def assemble_learner(
    ctx: RoleContext, world: World, start: Path, optimizer: Optimizer, max_grad_norm: float
) -> Learner:
    ctx.health.doing("loading weights", still_s=io_stall_s(world.size))
    policy = load_policy(ctx.manifest.model, ctx.manifest.trainer, world, start)
    replays_routes = ctx.stage == "rl" and ctx.manifest.transport.routed_experts
    arguments = ctx.manifest.trainer, optimizer, max_grad_norm, replays_routes
    learner = Learner(policy, world, *arguments)
    if ctx.manifest.trainer.lora is not None:
        learner.base_sha256 = base_sha256(ctx.run_dir, ctx.stage, start)
    if (elastic := ctx.manifest.trainer.elastic) is not None:
        learner.outer_momentum = fresh_outer(learner)
        # With fragments or in RL, checkpoints also store the weights after DiLoCo's last round.
        has_start = elastic.fragments > 1 or ctx.stage == "rl"
        learner.outer_start = fresh_outer(learner) if has_start else {}
    return learner


@contextmanager
def assemble_site(
    ctx: RoleContext, learner: Learner, resumed: Path | None
) -> Iterator[SiteTraining | None]:
    if (spec := ctx.manifest.trainer.elastic) is None:
        yield None
        return
    with SiteTraining(ctx, learner, spec, resumed) as site:
        yield site


def load_policy(model: Model, trainer: Trainer, world: World, start: Path) -> Policy:
    policy = build_policy(model, trainer, world)
    weights.load(policy.network, start, on_tensor=mark_part)
    if trainer.lora is not None:
        lora.initialize(policy.network, trainer.lora.seed)
    return policy


@contextmanager
def assemble_rl(ctx: RoleContext, world: World) -> Iterator[RlLoop]:
    manifest = ctx.manifest
    spared = _check_room(ctx) if world.is_first else 0
    trainer, start = manifest.trainer, start_weights(ctx)
    learner = assemble_learner(ctx, world, start, trainer.optimizer, trainer.max_grad_norm)
    num_nodes = stage(manifest, ctx.stage).num_nodes
    publisher = _publisher(ctx, learner.policy, world, num_nodes)
    learner.before_step = publisher.settle
    learner.guard = MismatchGuard(manifest, world, ctx.log)
    resumed = resume(ctx, learner, "rl")
    if resumed is not None and world.is_first:
        publisher.restore(resumed / "trainer")
    orchestrator = await_endpoints(ctx, "orchestrator", 1, scaled(ORCHESTRATOR_DEADLINE_S))[0]
    if isinstance(publisher, DirectPublisher):
        publisher.listen(orchestrator.url)
    receiver = RolloutReceiver(orchestrator.url, ctx.index)
    try:
        with assemble_site(ctx, learner, resumed) as site:
            yield RlLoop(
                ctx=ctx,
                world=world,
                learner=learner,
                publisher=publisher,
                receiver=receiver,
                checkpoints=StageCheckpoints(ctx, learner, "rl", "orchestrator", spared),
                site=site,
                batch_deadline_s=batch_deadline_s(manifest),
                batch_behind_s=_batch_behind_s(manifest, world),
                publish_still_s=_publish_still_s(manifest, world, num_nodes),
            )
    finally:
        receiver.close()
        publisher.close()


def batch_deadline_s(manifest: Manifest) -> float:
    """Return the time limit to receive a batch.

    Engines may have to sample an evaluation and a batch, in waves of concurrent rollouts.
    """
    orchestrator, tasks = manifest.orchestrator, manifest.tasks.evaluation
    evaluation, admission = orchestrator.evaluation, orchestrator.admission
    ratio = orchestrator.max_sampled_ratio if orchestrator.drop_zero_advantage_groups else 1.0
    evaluated = len(tasks) * evaluation.num_problems * evaluation.rollouts_per_problem
    work = ratio * orchestrator.rollouts_per_batch + evaluated
    in_flight = admission.max_in_flight
    if admission.kind == "adaptive":
        in_flight = admission.min_in_flight
    waves = math.ceil(work / in_flight)
    return scaled(STEP_DEADLINE_S) + (SPARE_WAVES + waves) * orchestrator.rollout_timeout_s


def _batch_behind_s(manifest: Manifest, world: World) -> float:
    is_one_node = world.size <= manifest.hardware.devices_per_node
    return step_stall_s(world, manifest.trainer) if is_one_node else io_stall_s(world.size)


def _publish_still_s(manifest: Manifest, world: World, num_nodes: int) -> float:
    """Return a publication's stall limit.

    It exceeds the transfer's time limit, because the transfer's error names the absent rank.
    """
    is_local = manifest.transport.weights not in DIRECT_KINDS and num_nodes == 1
    return step_stall_s(world, manifest.trainer) if is_local else io_stall_s(world.size)


def _publisher(ctx: RoleContext, policy: Policy, world: World, num_nodes: int) -> Publisher:
    kind = ctx.manifest.transport.weights
    engine_dtype = getattr(torch, ctx.manifest.inference.dtype)
    place = ctx.run_dir, ctx.attempt, num_nodes
    if kind in DIRECT_KINDS:
        source = make_weight_sender(kind, *place, ctx.host, world.rank, world.size, world.device)
        return DirectPublisher(policy, source, engine_dtype, ctx)
    wire = None
    if world.is_first:
        wire = WeightPublisher(weight_dir(*place), _num_kept(ctx.manifest))
    if kind == "adapters":
        return AdapterPublisher(policy, wire, engine_dtype)
    return Publisher(policy, wire)


def _num_kept(manifest: Manifest) -> int:
    # A version each for engines, trainer, queue and each batch ahead.
    return manifest.orchestrator.max_batches_ahead + 3


def _check_room(ctx: RoleContext) -> int:
    """Return the bytes of shared memory for published weights.

    Raise OrreryError if they do not fit.
    """
    manifest = ctx.manifest
    if manifest.transport.weights != "files":
        return 0
    network = build_network(manifest.model, manifest.trainer, "meta")
    version_bytes = sum(hf.num_bytes for hf in hf_tensors(network))
    keep = min(_num_kept(manifest), manifest.stages.rl.num_steps)
    return check_room(ctx.run_dir, stage(manifest, ctx.stage).num_nodes, keep, version_bytes)
