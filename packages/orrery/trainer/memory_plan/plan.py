"""The bytes of one rank at every moment of a step.

n parameters of an FSDP unit as gathered on one rank · s ranks that shard it · T tokens here
M scored tokens · V vocabulary · D hidden · bytes of a value: p weights, c compute, r reductions
"""

from collections.abc import Iterator
from dataclasses import dataclass

from orrery.kernels.token_logprob import ALIGNMENT, AUTO_SHARE, blocks
from orrery.manifest.schema import Model, Optimizer, Trainer
from orrery.trainer.memory_plan.sizes import (
    ParameterCounts,
    UnitParameters,
    activation_bytes,
    count_parameters,
    dtype_bytes,
)
from orrery.trainer.optim.muon import BATCH_VALUES
from orrery.trainer.optim.offload import NUM_SLOTS
from orrery.trainer.optim.optimizer import OFFLOADED_BYTES, WHOLE_BYTES
from orrery.trainer.parallel import fsdp

CATEGORIES = (
    "weights",
    "optimizer state",
    "gradients",
    "gathered weights",
    "reduction",
    "activations",
    "recomputation",
    "LM head",
)
BLOCKS_ON_DEVICE = 2  # with activation offload
MUON_COPIES = 4  # bfloat16 temporaries of a batch of matrices

Bytes = dict[str, int]


@dataclass(frozen=True)
class Workload:
    """A data rank's tokens of a micro-batch, longest document, and micro-batches a step.

    `merged_width`: bytes of a merged adapted weight's value, for a direct transfer, or 0.
    """

    tokens: int
    document_tokens: int
    micro_batches: int
    merged_width: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Device bytes by category for every moment of a step."""

    moments: dict[str, Bytes]
    host_bytes: int

    @property
    def fullest(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.moments[self.fullest].values())


def plan_memory(
    model: Model,
    trainer: Trainer,
    load: Workload,
    device_bytes: int,
    counted: ParameterCounts | None = None,
) -> MemoryPlan:
    """Return one rank's plan. Raise OrreryError as `count_parameters` does."""
    counted = counted or count_parameters(model, trainer.lora)
    step = _StepPlan(model, trainer, load, device_bytes, counted)
    return MemoryPlan(dict(step.moments()), step.host_bytes())


def num_states(optimizer: Optimizer, counted: ParameterCounts) -> int:
    """Return the number of values in the whole model's optimizer state."""
    per_value = {"adamw": (2, 2), "muon": (1, 2), "sgd": (1, 1), "sign_sgd": (0, 0)}
    in_block, outside = per_value[optimizer.kind]
    if optimizer.kind == "sgd" and not optimizer.momentum:
        return 0
    in_blocks = sum(unit.trained for unit in counted.layers)
    every = sum(unit.trained for unit in counted.units)
    return in_block * in_blocks + outside * (every - in_blocks)


class _StepPlan:
    def __init__(
        self,
        model: Model,
        trainer: Trainer,
        load: Workload,
        device_bytes: int,
        counted: ParameterCounts,
    ):
        self.model, self.trainer, self.load = model, trainer, load
        self.device_bytes, self.counted = device_bytes, counted
        mesh = trainer.mesh
        self.is_sharded = fsdp.is_needed(trainer)
        self.on_host = self.is_sharded and trainer.fsdp.cpu_offload
        self.ep, self.shards = mesh.ep, mesh.dp_shard * mesh.cp
        self.p = dtype_bytes(trainer.param_dtype)
        self.c = dtype_bytes(trainer.compute_dtype)
        self.r = dtype_bytes(trainer.reduce_dtype)
        self.copies = 0
        if fsdp.has_copies(trainer):
            self.copies = self.c * sum(unit.trained for unit in counted.units)
        self.tokens = -(-load.tokens // mesh.cp)
        self.blocks = [activation_bytes(model, trainer, i) for i in range(model.num_layers)]

    def moments(self) -> Iterator[tuple[str, Bytes]]:
        """Yield each moment, beside weights, states and waiting gradients:

        LM head           all activations · gathered head and last block · the head's gradient (c·n)
                          · logits · T·D·(3c + 4) hidden states and their gradient
        block, backward   activations up to it · recomputation · it and the block before, gathered
                          (c·n) · its gradient · the reduction of the next · two T·D gradients
        block, reducing   activations before it · the block before, gathered · its gradient and
                          reduction (r·n, or 3·r·n on a single rank, with copies)
        embedding         a dense V·D gradient (two if tied) · the reduction of block 0
        optimizer         all reduced gradients · Muon's temporaries
        """
        counted, layers = self.counted, self.counted.layers
        root, alone = counted.root, self.shards == 1
        hidden = self.tokens * self.model.hidden_size
        head = counted.after if counted.after.total else root
        head_gathered = 0 if head is root else self.gathered(head)
        yield (
            "LM head",
            self.moment(
                gradients=self.waiting(()) + self.own(head),
                gathered=self.gathered_before(len(layers)) + head_gathered,
                activations=self.activations(len(layers) - 1),
                head=self.logits() + hidden * (3 * self.c + 4),
            ),
        )
        done: tuple[UnitParameters, ...] = (counted.after,)
        for layer in reversed(range(len(layers))):
            unit = layers[layer]
            gradients = self.waiting(done) + self.own(unit)
            gradients += self.own(head) if head is root else 0
            backward = self.tokens * self.blocks[layer].backward
            yield (
                f"block {layer}, backward",
                self.moment(
                    gradients=gradients,
                    gathered=self.gathered(unit) + self.gathered_before(layer),
                    reduction=self.reducing(done[-1]),
                    activations=self.activations(layer),
                    again=backward + 2 * self.c * hidden,
                ),
            )
            copied = self.own(unit) if alone and self.is_sharded else 0
            yield (
                f"block {layer}, reducing gradients",
                self.moment(
                    gradients=gradients - copied,
                    gathered=self.gathered_before(layer),
                    reduction=self.reducing(unit) * (3 if alone else 1),
                    activations=self.activations(layer - 1),
                    again=self.c * hidden,
                ),
            )
            done = (*done, unit)
        embedding = counted.before if counted.before.total else root
        dense = self.own(embedding) * (2 if embedding is root else 1)
        yield (
            "embedding, backward",
            self.moment(
                gradients=self.waiting(done) + dense,
                gathered=self.gathered(embedding),
                reduction=max(self.reducing(layers[0]), self.reducing(embedding)),
                again=self.c * hidden,
            ),
        )
        muon = MUON_COPIES * 2 * BATCH_VALUES if self.trainer.optimizer.kind == "muon" else 0
        gradients = self.waiting(counted.units)
        yield "optimizer", self.moment(gradients=gradients, gathered=-self.copies, again=muon)

    def moment(
        self,
        gradients: int,
        gathered: int = 0,
        reduction: int = 0,
        activations: int = 0,
        again: int = 0,
        head: int = 0,
    ) -> Bytes:
        always = self.weights(), self.states()
        more = gradients, self.copies + gathered, reduction, activations, again, head
        return dict(zip(CATEGORIES, (*always, *more), strict=True))

    def weights(self) -> int:
        if self.on_host:
            return 0
        total = 0
        for unit in self.counted.units:
            total += self.p * unit.trained + self.c * unit.frozen
            total += self.load.merged_width * unit.adapted
        return total // self.shards

    def states(self) -> int:
        """Return all states (p·n / s each), or the slots of offloaded states."""
        if self.on_host:
            return 0
        num_bytes = self.p * num_states(self.trainer.optimizer, self.counted) // self.shards
        if not self.trainer.memory.optimizer_offload:
            return num_bytes
        bucket = OFFLOADED_BYTES
        if self.trainer.optimizer.kind == "muon":
            bucket = max(WHOLE_BYTES, self.p * self.counted.largest_in_a_layer // self.shards)
        return min(num_bytes, NUM_SLOTS * bucket)

    def host_bytes(self) -> int:
        """Return host bytes. Activations count twice, as buffers are powers of two."""
        total = 0
        if self.trainer.memory.activation_offload:
            total = 2 * self.tokens * sum(one.kept for one in self.blocks[:-1])
        if self.on_host or self.trainer.memory.optimizer_offload:
            total += self.p * num_states(self.trainer.optimizer, self.counted) // self.shards
        if self.on_host:
            units = self.counted.units
            both = sum(2 * self.p * unit.trained + self.c * unit.frozen for unit in units)
            total += both // self.shards
        return total

    def gathered(self, unit: UnitParameters) -> int:
        return self.c * unit.gathered(self.ep) if self.is_sharded else 0

    def gathered_before(self, layer: int) -> int:
        units: tuple[UnitParameters, ...] = (self.counted.before, *self.counted.layers[:layer])
        if self.trainer.fsdp.reshard_after_forward:
            units = units[-1:]
        return self.gathered(self.counted.root) + sum(map(self.gathered, units))

    def own(self, unit: UnitParameters) -> int:
        return (self.c if self.is_sharded else self.p) * unit.gathered_trained(self.ep)

    def reducing(self, unit: UnitParameters) -> int:
        return self.r * unit.gathered_trained(self.ep) if self.is_sharded else 0

    def waiting(self, done: tuple[UnitParameters, ...]) -> int:
        """Return the gradients that wait for the optimizer, in the last micro-batch.

        Units in `done` are reduced (p·n / s). Others have earlier micro-batches' gradients, whole
        (r·n) with `reduce_gradients: step`.
        """
        total = 0
        for unit in self.counted.units:
            reduced = 0 if self.on_host else self.p * unit.trained // self.shards
            if any(unit is other for other in done):  # identity, because blocks are equal
                total += reduced
            elif self.load.micro_batches > 1:
                are_whole = self.is_sharded and self.trainer.fsdp.reduce_gradients == "step"
                total += self.r * unit.gathered_trained(self.ep) if are_whole else reduced
        return total

    def activations(self, last: int) -> int:
        each = [one.kept for one in self.blocks[: last + 1]]
        if self.trainer.memory.activation_offload:
            each = each[-BLOCKS_ON_DEVICE:]
        return self.tokens * sum(each)

    def logits(self) -> int:
        """Return 6 bytes a logit of the largest tile, or 4·M·V and 2 of a tile if logits are kept.

        M = T is an upper bound.
        """
        vocab, memory = self.model.vocab_size, self.trainer.memory
        fitting = self.device_bytes // (AUTO_SHARE * 6 * vocab)
        chunk = max(ALIGNMENT, fitting // ALIGNMENT * ALIGNMENT)
        if memory.lm_head_chunk_tokens != "auto":
            chunk = memory.lm_head_chunk_tokens
        tiles = blocks(vocab, chunk * vocab // max(1, self.tokens))
        words = max((tile.stop - tile.start for tile in tiles), default=0)
        tile = self.tokens * words
        return 4 * self.tokens * vocab + 2 * tile if memory.lm_head_keeps_logits else 6 * tile
