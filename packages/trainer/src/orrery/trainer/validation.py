"""Validation: the loss on examples that are never trained.

- In: the first `num_examples` of `stages.sft.validation.data`, masked as the training examples are. Out: the mean cross-entropy of their
  trained tokens, −(Σ log π) / N over all ranks: whatever the ranks and micro-batches, the same sum and the same count.
- Never: a gradient, or a weight that stays gathered; a training run makes the same bits with and without it.
- A chat of both sets, message by message the same, is refused: all training chats are compared, each rank its share.
"""

import hashlib
import math
from pathlib import Path

import msgspec
import torch

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.schema import Manifest
from orrery.trainer.chats import Chat, Chats
from orrery.trainer.heartbeat import mark_micro_batch
from orrery.trainer.learner import Learner
from orrery.trainer.micro_batch import micro_batch
from orrery.trainer.parallel.fsdp import release
from orrery.trainer.parallel.world import World
from orrery.trainer.sft_data import open_examples
from orrery.transport.columns import Columns
from orrery.transport.packing import pack_for

FIELD = "stages.sft.validation"


class ValidationSet:
    """Ready to be run again and again: this rank's micro-batches stay in memory."""

    def __init__(self, manifest: Manifest, examples: Columns, world: World):
        self.micro_batches = [
            examples.select(samples)
            for samples in pack_for(manifest, examples.lengths)[world.data_rank]
        ]

    @torch.no_grad()
    def loss(self, learner: Learner) -> tuple[float, int]:
        """(cross-entropy in nats a token, tokens) of the weights as they stand now. A collective. Raises RunFailed."""
        world = learner.world
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        for columns in self.micro_batches:
            mark_micro_batch(world.device)
            batch = micro_batch(columns, learner.step + 1, world.device, learner.shard)
            logprob_M, _ = learner.policy(batch)
            counts_M = (
                batch.loss.cross_entropy_weight.double()
            )  # 1, or 0 for the row that only keeps a rank in step
            total += torch.stack([-(logprob_M.double() * counts_M).sum(), counts_M.sum()])
        release(learner.policy)
        nats, num_tokens = world.sum(total).tolist()
        if not math.isfinite(nats):
            raise RunFailed(
                f"validation after step {learner.step}: cross-entropy is {nats}{learner.weights_to_blame()}"
            )
        return nats / num_tokens, int(num_tokens)


def load_validation(
    manifest: Manifest, tokenizer: Path, training: Chats, world: World
) -> ValidationSet | None:
    """Raises OrreryError where there are too few examples, or one that is trained too. A collective."""
    spec = manifest.stages.sft.validation
    if spec is None:
        return None
    examples = open_examples(manifest, spec.data, f"{FIELD}.data", tokenizer)
    if len(examples) < spec.num_examples:
        raise OrreryError(
            f"{FIELD}.num_examples: {spec.num_examples} are asked for and data has {len(examples)}"
        )
    refuse_shared([examples.chats[index] for index in range(spec.num_examples)], training, world)
    return ValidationSet(manifest, examples.columns(range(spec.num_examples)), world)


def refuse_shared(validated: list[Chat], training: Chats, world: World) -> None:
    """Raises OrreryError on every rank where a chat of `validated` stands in `training`. A collective."""
    held = {_digest(chat): chat.where for chat in validated}
    mine = range(world.rank, len(training), world.size)
    found = next((index for index in mine if _digest(training[index]) in held), -1)
    shared = [index for index in world.each(found) if index >= 0]
    if shared:
        chat = training[min(shared)]
        raise OrreryError(
            f"{FIELD}.data: {held[_digest(chat)]} stands in the training data too, as {chat.where}; leave it out of one of them"
        )


def _digest(chat: Chat) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(chat.messages), digest_size=16).digest()
