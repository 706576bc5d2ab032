"""The bytes of one rank, moment by moment through a step.

n parameters of a unit of FSDP, as whole as one rank gathers it · s ranks that shard it · T tokens here · M scored tokens · V vocabulary ·
D hidden · bytes of a value: p of weights, c in computation, r in reductions

Always: weights, p·n / s of what is trained and c·n / s of what is frozen; the optimizer's states, p·n / s each (AdamW two, Muon one for
blocks and two for the rest, SGD one with momentum), or three buckets where they are offloaded: of 128 MiB, or of Muon's whole matrices
256 MiB, more where one matrix is more. With `cpu_offload` neither.
On a direct wire also merged copies of what has adapters, n / s in the engines' dtype.

Gradients: p·n / s of each unit that has reduced them. Those that micro-batches before have left: with `reduce_gradients: micro_batch` the
same, of all units; with `step` r·n, whole. A unit's own are c·n until it reduces them.

A gathered unit is c·n. Reducing, a unit has r·n beside its gradients, which stay until the unit before it (in the network) reduces; one
rank alone copies instead, and has 3·r·n at a time.

Moments, each beside the above:
    LM head    activations of all blocks · head gathered, and the last block (or all units, unless `reshard_after_forward`) · the head's
               gradient · T·D·(3c + 4) hidden states and their gradient · logits: 6 bytes each of the largest tile, or 4·M·V and 2 of a tile
    block i    activations of blocks up to i · what is made again of i and passes through it (`kept.py`) · i and i − 1 gathered · i's
               gradient · the reduction of i + 1 · two T·D hidden gradients
    reduce i   activations of blocks before i · i − 1 gathered · i's gradient and its reduction
    embedding  a dense V·D gradient (two where it is the head's as well) · the reduction of block 0
    optimizer  all gradients, reduced; Muon's matrices besides

With `activation_offload` the activations of two blocks are on the device, whatever the number of blocks.

In host memory: with `activation_offload` the activations of all blocks but the last, twice (buffers are powers of two, so up to twice as
large), with `optimizer_offload` the states, with `cpu_offload` weights, gradients and states.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from orrery.kernels.token_logprob.chunked import ALIGNMENT, AUTO_SHARE, blocks
from orrery.manifest.schema import Model, Optimizer, Trainer
from orrery.trainer.memory_plan.kept import block, width
from orrery.trainer.memory_plan.sizes import Sizes, Unit, sizes
from orrery.trainer.optim.offload import NUM_SLOTS
from orrery.trainer.optim.optimizer import OFFLOADED_BYTES, WHOLE_BYTES
from orrery.trainer.optim.whole_matrices import BATCH_VALUES
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
BLOCKS_ON_DEVICE = 2  # of those whose activations are offloaded
MUON_COPIES = 4  # of a batch of matrices, in two bytes a value: the iteration's own

Bytes = dict[str, int]


@dataclass(frozen=True)
class Load:
    """The work of a data rank: tokens of a micro-batch, its longest document, micro-batches of a step.

    `merged_width`: bytes of a value of the merged copies that weights under adapters have for a direct wire; 0 where there are none.
    """

    tokens: int
    document_tokens: int
    micro_batches: int
    merged_width: int = 0


@dataclass(frozen=True)
class Plan:
    """Bytes by category, for every moment of a step; a name says where in it. `host_bytes`: what waits in host memory."""

    moments: dict[str, Bytes]
    host_bytes: int

    @property
    def fullest(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.moments[self.fullest].values())


def plan(
    model: Model, trainer: Trainer, load: Load, device_bytes: int, counted: Sizes | None = None
) -> Plan:
    """`counted`: the model's sizes under the trainer's adapters, where the caller has them. Raises OrreryError as `sizes` does."""
    step = _Step(model, trainer, load, device_bytes, counted or sizes(model, trainer.lora))
    return Plan(dict(step.moments()), step.host_bytes())


def num_states(optimizer: Optimizer, counted: Sizes) -> int:
    """How many values an optimizer keeps of a whole model, all its ranks together."""
    blocks, rest = {"adamw": (2, 2), "muon": (1, 2), "sgd": (1, 1), "sign_sgd": (0, 0)}[
        optimizer.kind
    ]
    if optimizer.kind == "sgd" and not optimizer.momentum:
        return 0
    in_blocks = sum(unit.trained for unit in counted.layers)
    return blocks * in_blocks + rest * (sum(unit.trained for unit in counted.units) - in_blocks)


class _Step:
    def __init__(
        self, model: Model, trainer: Trainer, load: Load, device_bytes: int, counted: Sizes
    ):
        self.model, self.trainer, self.load, self.device_bytes, self.sizes = (
            model,
            trainer,
            load,
            device_bytes,
            counted,
        )
        mesh = trainer.mesh
        self.is_sharded = fsdp.is_needed(trainer)
        self.on_host = self.is_sharded and trainer.fsdp.cpu_offload
        self.ep, self.shards = mesh.ep, mesh.dp_shard * mesh.cp
        self.p, self.c, self.r = (
            width(dtype)
            for dtype in (trainer.param_dtype, trainer.compute_dtype, trainer.reduce_dtype)
        )
        self.copies = (
            self.c * sum(unit.trained for unit in counted.units) if fsdp.has_copies(trainer) else 0
        )
        self.tokens = -(-load.tokens // mesh.cp)
        self.blocks = [block(model, trainer, layer) for layer in range(model.num_layers)]

    def moments(self) -> Iterator[tuple[str, Bytes]]:
        sizes, layers = self.sizes, self.sizes.layers
        last = len(layers) - 1
        hidden = self.tokens * self.model.hidden_size
        head = sizes.after if sizes.after.trained + sizes.after.frozen else sizes.root
        reshard = self.trainer.fsdp.reshard_after_forward
        root = self.gathered(sizes.root)

        def ahead(layer: int) -> int:
            """Gathered beside `layer` itself: the one that the backward pass comes to next, or all that it is still to come to."""
            rest = (sizes.before, *layers[:layer])
            return root + (self.gathered(rest[-1]) if reshard else sum(map(self.gathered, rest)))

        yield (
            "LM head",
            self.moment(
                gradients=self.held(()) + self.own(head),
                gathered=ahead(last + 1) + (self.gathered(head) if head is not sizes.root else 0),
                activations=self.activations(last),
                head=self.logits() + hidden * (3 * self.c + 4),
            ),
        )
        done: tuple[Unit, ...] = (sizes.after,)
        for layer in reversed(range(len(layers))):
            unit, one = layers[layer], self.blocks[layer]
            common = {
                "gradients": self.held(done)
                + self.own(unit)
                + (self.own(head) if head is sizes.root else 0)
            }
            yield (
                f"block {layer}, backward",
                self.moment(
                    **common,
                    gathered=self.gathered(unit) + ahead(layer),
                    reduction=self.reducing(done[-1]),
                    activations=self.activations(layer),
                    again=self.tokens * one.backward + 2 * self.c * hidden,
                ),
            )
            alone = self.shards == 1
            yield (
                f"block {layer}, reducing gradients",
                self.moment(
                    gradients=common["gradients"]
                    - (self.own(unit) if alone and self.is_sharded else 0),
                    gathered=ahead(layer),
                    reduction=self.reducing(unit) * (3 if alone else 1),
                    activations=self.activations(layer - 1),
                    again=self.c * hidden,
                ),
            )
            done = (*done, unit)
        embedding = sizes.before if sizes.before.trained + sizes.before.frozen else sizes.root
        yield (
            "embedding, backward",
            self.moment(
                gradients=self.held(done)
                + self.own(embedding) * (2 if embedding is sizes.root else 1),
                gathered=self.gathered(embedding),
                reduction=max(self.reducing(layers[0]), self.reducing(embedding)),
                again=self.c * hidden,
            ),
        )
        muon = MUON_COPIES * 2 * BATCH_VALUES if self.trainer.optimizer.kind == "muon" else 0
        yield (
            "optimizer",
            self.moment(gradients=self.held(sizes.units), gathered=-self.copies, again=muon),
        )

    def moment(
        self,
        gradients: int,
        gathered: int = 0,
        reduction: int = 0,
        activations: int = 0,
        again: int = 0,
        head: int = 0,
    ) -> Bytes:
        every = (
            self.weights(),
            self.states(),
            gradients,
            self.copies + gathered,
            reduction,
            activations,
            again,
            head,
        )
        return dict(zip(CATEGORIES, every, strict=True))

    def weights(self) -> int:
        if self.on_host:
            return 0
        merged = self.load.merged_width
        return (
            sum(
                self.p * unit.trained + self.c * unit.frozen + merged * unit.adapted
                for unit in self.sizes.units
            )
            // self.shards
        )

    def states(self) -> int:
        if self.on_host:
            return 0
        num_bytes = self.p * num_states(self.trainer.optimizer, self.sizes) // self.shards
        if not self.trainer.memory.optimizer_offload:
            return num_bytes
        whole = max(WHOLE_BYTES, self.p * self.sizes.largest_in_a_layer // self.shards)
        return min(
            num_bytes,
            NUM_SLOTS * (whole if self.trainer.optimizer.kind == "muon" else OFFLOADED_BYTES),
        )

    def host_bytes(self) -> int:
        total = (
            2 * self.tokens * sum(one.kept for one in self.blocks[:-1])
            if self.trainer.memory.activation_offload
            else 0
        )
        if self.on_host or self.trainer.memory.optimizer_offload:
            total += self.p * num_states(self.trainer.optimizer, self.sizes) // self.shards
        if self.on_host:
            total += (
                sum(2 * self.p * unit.trained + self.c * unit.frozen for unit in self.sizes.units)
                // self.shards
            )
        return total

    def gathered(self, unit: Unit) -> int:
        return self.c * unit.whole(self.ep) if self.is_sharded else 0

    def own(self, unit: Unit) -> int:
        """A unit's gradients as the backward pass leaves them."""
        return (self.c if self.is_sharded else self.p) * unit.whole_trained(self.ep)

    def reducing(self, unit: Unit) -> int:
        return self.r * unit.whole_trained(self.ep) if self.is_sharded else 0

    def held(self, done: tuple[Unit, ...]) -> int:
        """Gradients that wait for the optimizer once `done` have reduced theirs of this micro-batch, the last of its step."""
        total = 0
        for unit in self.sizes.units:
            reduced = 0 if self.on_host else self.p * unit.trained // self.shards
            if any(unit is other for other in done):  # blocks are alike, so equality would not do
                total += reduced
            elif self.load.micro_batches > 1:
                is_whole = self.is_sharded and self.trainer.fsdp.reduce_gradients == "step"
                total += self.r * unit.whole_trained(self.ep) if is_whole else reduced
        return total

    def activations(self, last: int) -> int:
        each = [one.kept for one in self.blocks[: last + 1]]
        if self.trainer.memory.activation_offload:
            each = each[-BLOCKS_ON_DEVICE:]
        return self.tokens * sum(each)

    def logits(self) -> int:
        """Every token counts as scored: an upper bound where prompts are long."""
        vocab, memory = self.model.vocab_size, self.trainer.memory
        auto = max(
            ALIGNMENT, self.device_bytes // (AUTO_SHARE * 6 * vocab) // ALIGNMENT * ALIGNMENT
        )
        chunk = auto if memory.lm_head_chunk_tokens == "auto" else memory.lm_head_chunk_tokens
        words = max(
            (
                tile.stop - tile.start
                for tile in blocks(vocab, chunk * vocab // max(1, self.tokens))
            ),
            default=0,
        )
        tile = self.tokens * words
        return 4 * self.tokens * vocab + 2 * tile if memory.lm_head_keeps_logits else 6 * tile
