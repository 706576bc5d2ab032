"""Train the SFT stage.

Validate before the first step, every `interval_steps` steps and after the last.
"""

import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.schema import Manifest
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import scaled
from orrery.trainer.checkpoint_writer import StageCheckpoints
from orrery.trainer.elastic import SiteTraining
from orrery.trainer.heartbeat import mark_micro_batch, step_stall_s
from orrery.trainer.learner import Learner, StepResult, count_totals, learning_rate_factor
from orrery.trainer.parallel.fsdp import reshard_all
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import micro_batch
from orrery.trainer.sft_data import (
    Chat,
    Chats,
    Examples,
    Texts,
    batches,
    open_examples,
    prefetch,
    text_batches,
)
from orrery.wire.columns import Columns
from orrery.wire.packing import pack_for

TOKENISE_DEADLINE_S = 600.0
VALIDATION = "stages.sft.validation"


def sft(
    learner: Learner,
    examples: Examples | Texts,
    validation: "ValidationSet | None",
    ctx: RoleContext,
    site: SiteTraining | None = None,
) -> None:
    spec, first_step = ctx.manifest.sft, learner.step + 1
    with StageCheckpoints(ctx, learner, "sft") as checkpoints:
        stage = _SftLoop(ctx, learner, examples, validation, checkpoints, site, first_step)
        while learner.step < spec.num_steps:
            stage.run()
        if validation is not None:
            _validate(validation, learner, ctx, is_first=False)


@dataclass(frozen=True)
class _SftLoop:
    ctx: RoleContext
    learner: Learner
    examples: Examples | Texts
    validation: "ValidationSet | None"
    checkpoints: StageCheckpoints
    site: SiteTraining | None
    first_step: int

    def run(self) -> None:
        """Train to the last step, or to DiLoCo's next round."""
        ctx, learner, checkpoints = self.ctx, self.learner, self.checkpoints
        manifest, spec, world = ctx.manifest, ctx.manifest.sft, learner.world
        last_step = spec.num_steps
        if self.site is not None:
            last_step = self.site.next_round_step
        items = batches(self.examples, manifest, learner.step)
        if isinstance(self.examples, Texts):
            items = text_batches(self.examples, manifest, learner.step, self.site)
        with prefetch(items) as next_batch:
            for step in range(learner.step + 1, last_step + 1):
                checkpoints.check()
                is_first = step == self.first_step
                if self.validation and learner.step % self.validation.interval_steps == 0:
                    _validate(self.validation, learner, ctx, is_first)
                begin_s = time.monotonic()
                what, deadline_s = f"batch {step} to be tokenised", scaled(TOKENISE_DEADLINE_S)
                with ctx.health.waiting(what, deadline_s=deadline_s):
                    batch = next_batch()
                wait_s = time.monotonic() - begin_s
                limit_s = step_stall_s(world, manifest.trainer, is_first)
                ctx.health.doing("sft", step=step, still_s=limit_s)
                mine = _share(batch, manifest, world)
                lr_factor = learning_rate_factor(spec.schedule, step, spec.num_steps)
                result = learner.learn(mine, len(mine), count_totals(mine, world), lr_factor)
                if self.site is not None:
                    self.site.after_step(result.num_tokens)
                is_due = checkpoints.is_due(step)
                files = self.site.checkpoint_files() if self.site and is_due else None
                blocked_s = checkpoints.copy(files) if is_due else 0.0
                if world.is_first:
                    _record(ctx, step, result, time.monotonic() - begin_s, blocked_s, wait_s)
                if is_due:
                    checkpoints.write()


def _share(batch: Columns, manifest: Manifest, world: World) -> list[Columns]:
    return [batch.select(samples) for samples in pack_for(manifest, batch.lengths)[world.data_rank]]


def _record(
    ctx: RoleContext,
    step: int,
    result: StepResult,
    step_time_s: float,
    checkpoint_blocked_s: float,
    wait_s: float,
) -> None:
    ctx.metrics.write(
        step,
        **result.metrics,
        step_time_s=step_time_s,
        checkpoint_blocked_s=checkpoint_blocked_s,
        tokens_per_s=result.num_tokens / step_time_s,
        wait_s=wait_s,
    )
    num_steps = ctx.manifest.sft.num_steps
    if step % 20 == 0 or step == num_steps:
        ctx.log.info("sft step %d of %d: loss %.4f", step, num_steps, result.metrics["loss"])


class ValidationSet:
    def __init__(
        self, manifest: Manifest, examples: Columns, world: World, interval_steps: int = 1
    ):
        self.micro_batches = _share(examples, manifest, world)
        self.interval_steps = interval_steps

    @torch.no_grad()
    def loss(self, learner: Learner) -> tuple[float, int]:
        """Return (cross-entropy in nats per token, number of trained tokens). A collective.

        Raise RunFailed if the cross-entropy is not finite.
        """
        world = learner.world
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        for columns in self.micro_batches:
            mark_micro_batch(world.device)
            batch = micro_batch(columns, learner.step + 1, world.device, learner.shard)
            logprob_M, _ = learner.policy(batch)
            counts_M = batch.loss.cross_entropy_weight.double()
            total += torch.stack([-(logprob_M.double() * counts_M).sum(), counts_M.sum()])
        reshard_all(learner.policy)
        nats, num_tokens = world.sum(total).tolist()
        if not math.isfinite(nats):
            raise RunFailed(
                f"validation after step {learner.step}: "
                f"cross-entropy is {nats}{learner.weights_to_blame()}"
            )
        return nats / num_tokens, int(num_tokens)


def load_validation(
    manifest: Manifest, tokenizer: Path, training: Chats, world: World
) -> ValidationSet | None:
    """Load the first `num_examples` validation examples. A collective.

    Raise OrreryError if there are fewer or `training` contains one.
    """
    spec = manifest.sft.validation
    if spec is None:
        return None
    examples = open_examples(manifest, spec.data, f"{VALIDATION}.data", tokenizer)
    if len(examples) < spec.num_examples:
        raise OrreryError(
            f"{VALIDATION}.num_examples: {spec.num_examples} exceeds the {len(examples)} "
            "examples of the data; lower it"
        )
    refuse_shared([examples.chats[index] for index in range(spec.num_examples)], training, world)
    columns = examples.columns(range(spec.num_examples))
    return ValidationSet(manifest, columns, world, spec.interval_steps)


def refuse_shared(validated: list[Chat], training: Chats, world: World) -> None:
    """Raise OrreryError on all ranks if `training` contains a `validated` chat. A collective."""
    held = {_digest(chat): chat.where for chat in validated}
    mine = range(world.rank, len(training), world.size)
    found = next((index for index in mine if _digest(training[index]) in held), -1)
    shared = [index for index in world.all_gather(found) if index >= 0]
    if shared:
        chat = training[min(shared)]
        raise OrreryError(
            f"{VALIDATION}.data: {held[_digest(chat)]} is in the training data too, "
            f"as {chat.where}; leave it out of one of them"
        )


def _digest(chat: Chat) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(chat.messages), digest_size=16).digest()


def _validate(
    validation: ValidationSet, learner: Learner, ctx: RoleContext, is_first: bool
) -> None:
    step, begin_s = learner.step, time.monotonic()
    limit_s = step_stall_s(learner.world, ctx.manifest.trainer, is_first)
    ctx.health.doing("validating", step=step, still_s=limit_s)
    with ctx.metrics.span("validation", step=step):
        loss, num_tokens = validation.loss(learner)
    if learner.world.is_first:
        ctx.metrics.write(
            step,
            event="validation",
            validation_loss=loss,
            num_validation_tokens=num_tokens,
            validation_s=time.monotonic() - begin_s,
        )
        ctx.log.info("sft step %d: validation loss %.4f on %d tokens", step, loss, num_tokens)
