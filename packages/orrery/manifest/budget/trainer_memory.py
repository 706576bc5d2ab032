"""Plan the bytes that torch allocates on a trainer rank at each moment of a step.

Torch's allocator reserves more.

c, p and r are the bytes of a value in `compute_dtype`, `param_dtype` and `reduce_dtype`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from orrery.manifest.budget.activations import activation_bytes_of_blocks, sparse_backward_bytes
from orrery.manifest.budget.parameters import (
    ParameterCounts,
    UnitParameters,
    block_weights,
    count_parameters,
)
from orrery.manifest.devices import auto_chunk_tokens, blocks
from orrery.manifest.schema import Manifest, Model, Optimizer, Trainer
from orrery.manifest.schema.manifest import DIRECT_KINDS
from orrery.manifest.schema.model import DTYPE_BYTES
from orrery.manifest.schema.trainer import host_bytes

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
OFFLOADED_BYTES = 128 << 20  # bucket of offloaded optimizer state, for PCIe's full rate
WHOLE_BYTES = 256 << 20  # bucket of Muon's state, also without offload, for equal results
NUM_SLOTS = 3  # buckets on the device at a time
BATCH_VALUES = 1 << 27  # maximum values that Muon orthogonalizes at a time
MUON_COPIES = 4  # Muon's temporary bfloat16 copies of each value
FREE_SHARE = 0.9  # share of planned free memory to use, because plans have errors

Bytes = dict[str, int]


@dataclass(frozen=True)
class Workload:
    """A context-parallel group's work in a step.

    `tokens`: of a micro-batch. `document_tokens`: of the longest document. `merged_width`: bytes
    per value of merged weights, if a LoRA run sends them by NCCL or NIXL.
    """

    tokens: int
    document_tokens: int
    micro_batches: int
    merged_width: int = 0


def stage_workload(manifest: Manifest, stage: str) -> tuple[Trainer, Workload]:
    """Return the trainer with the optimizer of `stage` ("sft" or "rl"), and the workload.

    The workload's samples have maximum length.
    """
    trainer, samples = manifest.trainer, manifest.orchestrator.rollouts_per_batch
    tokens = trainer.memory.max_tokens_per_micro_batch
    longest = manifest.inference.max_model_len_tokens
    if stage == "sft":
        longest = min(tokens, manifest.model.max_positions)
        if (sft := manifest.stages.sft) is not None:
            samples = sft.examples_per_batch
            trainer = trainer.model_copy(update={"optimizer": sft.optimizer})
    per_rank = -(-samples // trainer.mesh.num_data_ranks)
    is_direct = manifest.transport.weights in DIRECT_KINDS
    merged_width = 0
    if stage == "rl" and trainer.lora is not None and is_direct:
        merged_width = DTYPE_BYTES[manifest.inference.dtype]
    micro_batches = -(-per_rank // max(1, tokens // longest))
    return trainer, Workload(tokens, longest, micro_batches, merged_width)


@dataclass(frozen=True)
class MemoryPlan:
    """A rank's planned memory. `moments`: {moment of a step: {category: device bytes}}."""

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
    """Plan a rank's memory. "auto" chunks of the LM head depend on `device_bytes`."""
    counted = counted or count_parameters(model, trainer.lora)
    step = _StepPlan(model, trainer, load, device_bytes, counted)
    return MemoryPlan(dict(step.moments()), step.host_bytes())


def num_states(optimizer: Optimizer, counted: ParameterCounts) -> int:
    per_value = {"adamw": (2, 2), "muon": (1, 2), "sgd": (1, 1), "sign_sgd": (0, 0)}
    in_block, outside = per_value[optimizer.kind]
    if optimizer.kind == "sgd" and not optimizer.momentum:
        return 0
    in_blocks = sum(unit.trained for unit in counted.layers)
    every = sum(unit.trained for unit in counted.units)
    return in_block * in_blocks + outside * (every - in_blocks)


def state_bytes(trainer: Trainer, counted: ParameterCounts) -> tuple[int, int]:
    """Return a rank's optimizer state bytes: (device, host)."""
    mesh = trainer.mesh
    num_bytes = DTYPE_BYTES[trainer.param_dtype] * num_states(trainer.optimizer, counted)
    num_bytes //= mesh.dp_shard * mesh.cp
    resident = int(trainer.memory.optimizer_offload_resident * num_bytes)
    return resident, num_bytes - resident


def num_fp8_weights(model: Model) -> int:
    if not model.fp8:
        return 0
    return sum(
        weight.size
        for layer in range(model.num_layers)
        for weight in block_weights(model, layer)
        if weight.part in model.fp8 and weight.has_fp8
    )


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
        self.is_sharded = trainer.needs_fsdp
        self.on_host = self.is_sharded and trainer.fsdp.cpu_offload
        self.ep, self.shards = mesh.ep, mesh.dp_shard * mesh.cp
        self.p = DTYPE_BYTES[trainer.param_dtype]
        self.c = DTYPE_BYTES[trainer.compute_dtype]
        self.r = DTYPE_BYTES[trainer.reduce_dtype]
        self.copies = 0
        if trainer.has_compute_copies:
            self.copies = self.c * sum(unit.trained for unit in counted.units)
            self.copies += 2 * num_fp8_weights(model)  # FP8 weights and their transposes
        self.tokens = -(-load.tokens // mesh.cp)
        self.blocks = activation_bytes_of_blocks(model, trainer)
        self.always = self.weights(), self.states()
        self.kept_before = [0, *accumulate(block.kept for block in self.blocks)]
        early = counted.before, *counted.layers
        self.gathered_until = list(accumulate(map(self.gathered, early)))
        if trainer.fsdp.reshard_after_forward:
            self.gathered_until = list(map(self.prefetched, early))

    def moments(self) -> Iterator[tuple[str, Bytes]]:
        """Yield (moment, bytes by category), from the LM head to the optimizer."""
        counted, layers = self.counted, self.counted.layers
        root, alone = counted.root, self.shards == 1
        hidden = self.tokens * self.model.hidden_size
        head = counted.after if counted.after.total else root
        head_gathered = 0 if head is root else self.gathered(head)
        waiting = sum(map(self.earlier_gradient, counted.units))
        yield (
            "LM head",
            self.moment(
                gradients=waiting + self.own(head),
                gathered=self.gathered_before(len(layers)) + head_gathered,
                activations=self.activations(len(layers) - 1),
                # logits, hidden states and their gradient
                head=self.logits() + hidden * (3 * self.c + 4),
            ),
        )
        pairs = sparse_backward_bytes(self.model, self.trainer, self.tokens)
        done = counted.after
        for layer in reversed(range(len(layers))):
            unit = layers[layer]
            waiting += self.reduced_gradient(done) - self.earlier_gradient(done)
            gradients = waiting + self.during_backward(unit)
            gradients += self.own(head) if head is root else 0
            backward = self.tokens * self.blocks[layer].backward
            later = self.tokens * self.blocks[layer].late
            # Experts' down gradients exist before their gate and up gradients.
            experts = self.c * unit.trained_experts // self.ep if self.is_sharded else 0
            missing = min(backward - later, 2 * experts // 3)
            yield (
                f"block {layer}, backward",
                self.moment(
                    gradients=gradients - missing,
                    gathered=self.gathered(unit) + self.gathered_before(layer),
                    reduction=self.reducing(done),
                    activations=self.activations(layer),
                    again=backward + self.c * hidden + pairs,
                ),
            )
            copied = self.own(unit) if alone and self.is_sharded else 0
            yield (
                f"block {layer}, reducing gradients",
                self.moment(
                    gradients=gradients - copied,
                    gathered=self.gathered_before(layer),
                    # With one FSDP shard, the unit's gradient counts only in `reduction`.
                    reduction=self.reducing(unit) * (3 if alone else 1),
                    activations=self.activations(layer - 1),
                    again=self.c * hidden,
                ),
            )
            done = unit
        waiting += self.reduced_gradient(done) - self.earlier_gradient(done)
        embedding = counted.before if counted.before.total else root
        dense = self.own(embedding) * (2 if embedding is root else 1)
        yield (
            "embedding, backward",
            self.moment(
                gradients=waiting + dense,
                gathered=self.gathered(embedding),
                reduction=max(self.reducing(layers[0]), self.reducing(embedding)),
                again=self.c * hidden,
            ),
        )
        muon = MUON_COPIES * 2 * BATCH_VALUES if self.trainer.optimizer.kind == "muon" else 0
        gradients = sum(map(self.reduced_gradient, counted.units))
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
        more = gradients, self.copies + gathered, reduction, activations, again, head
        return dict(zip(CATEGORIES, (*self.always, *more), strict=True))

    def weights(self) -> int:
        if self.on_host:
            return 0
        total = 0
        for unit in self.counted.units:
            total += self.p * unit.trained + self.c * unit.frozen
            total += self.load.merged_width * unit.adapted
        return total // self.shards

    def states(self) -> int:
        if self.on_host:
            return 0
        if not self.trainer.memory.optimizer_offload:
            return self.p * num_states(self.trainer.optimizer, self.counted) // self.shards
        resident, offloaded = state_bytes(self.trainer, self.counted)
        bucket = OFFLOADED_BYTES
        if self.trainer.optimizer.kind == "muon":
            bucket = max(WHOLE_BYTES, self.p * self.counted.largest_in_a_layer // self.shards)
        return resident + min(offloaded, NUM_SLOTS * bucket)

    def host_bytes(self) -> int:
        total = 0
        if self.trainer.memory.activation_offload:
            # Factor 2, because the buffers round up to powers of 2.
            total = 2 * self.tokens * sum(one.kept for one in self.blocks[:-1])
        if self.on_host or self.trainer.memory.optimizer_offload:
            total += state_bytes(self.trainer, self.counted)[1]
        if self.on_host:
            units = self.counted.units
            both = sum(2 * self.p * unit.trained + self.c * unit.frozen for unit in units)
            total += both // self.shards
        if self.trainer.elastic is not None:
            trained = sum(unit.trained for unit in self.counted.units) // self.shards
            inner = self.p * num_states(self.trainer.optimizer, self.counted) // self.shards
            total += host_bytes(self.trainer.elastic, trained, inner)
        return total

    def gathered(self, unit: UnitParameters) -> int:
        return self.c * unit.gathered(self.ep) if self.is_sharded else 0

    def prefetched(self, unit: UnitParameters) -> int:
        """Return the bytes gathered before use. With one FSDP shard, weights are cast at use."""
        if not self.is_sharded or self.shards == 1:
            return 0
        experts = (unit.trained_experts + unit.frozen_experts) // self.ep
        alone = self.shards == self.ep > 1
        return self.c * (unit.gathered(self.ep) - (experts if alone else 0))

    def gathered_before(self, layer: int) -> int:
        return self.gathered(self.counted.root) + self.gathered_until[layer]

    def own(self, unit: UnitParameters) -> int:
        width = self.c if self.is_sharded or self.trainer.has_compute_copies else self.p
        return width * unit.gathered_trained(self.ep)

    def during_backward(self, unit: UnitParameters) -> int:
        """Return a block's gradient bytes.

        With compute copies, only one weight's gradient is in the compute dtype at a time.
        """
        if not self.trainer.has_compute_copies:
            return self.own(unit)
        moved = self.reduced_gradient(unit) - self.earlier_gradient(unit)
        return moved + self.c * min(unit.trained, self.counted.largest_in_a_layer)

    def reducing(self, unit: UnitParameters) -> int:
        return self.r * unit.gathered_trained(self.ep) if self.is_sharded else 0

    def reduced_gradient(self, unit: UnitParameters) -> int:
        return 0 if self.on_host else self.p * unit.trained // self.shards

    def earlier_gradient(self, unit: UnitParameters) -> int:
        if self.load.micro_batches == 1:
            return 0
        if self.is_sharded and self.trainer.fsdp.reduce_gradients == "step":
            return self.r * unit.gathered_trained(self.ep)
        return self.reduced_gradient(unit)

    def activations(self, last: int) -> int:
        first, memory = 0, self.trainer.memory
        if memory.activation_offload:
            first = max(0, last - memory.activation_offload_max_in_flight)
        return self.tokens * (self.kept_before[last + 1] - self.kept_before[first])

    def logits(self) -> int:
        """Return the bytes of logits: 4 per logit, and 2 more in the current vocabulary tile.

        Without `lm_head_keeps_logits`, only this tile is in memory.
        """
        vocab, memory = self.model.vocab_size, self.trainer.memory
        chunk = auto_chunk_tokens(self.device_bytes, vocab)
        if memory.lm_head_chunk_tokens != "auto":
            chunk = memory.lm_head_chunk_tokens
        tiles = blocks(vocab, chunk * vocab // max(1, self.tokens))
        words = max((tile.stop - tile.start for tile in tiles), default=0)
        tile = self.tokens * words
        return 4 * self.tokens * vocab + 2 * tile if memory.lm_head_keeps_logits else 6 * tile


@dataclass(frozen=True)
class StateRooms:
    """Bytes of offloaded optimizer state that fit below the planned peak memory.

    - `forward`, `backward`: during this pass of each block in the first micro-batch.
    - `head`: during the LM head in the first micro-batch.
    - `arriving`: from each block's last backward pass to the step's end.
    """

    forward: tuple[int, ...]
    head: int
    backward: tuple[int, ...]
    arriving: tuple[int, ...]


def state_rooms(
    model: Model,
    trainer: Trainer,
    micro_batches: int,
    device_bytes: int,
    counted: ParameterCounts | None = None,
) -> StateRooms:
    tokens = trainer.memory.max_tokens_per_micro_batch

    def planned(count: int) -> MemoryPlan:
        load = Workload(tokens, tokens, count)
        return plan_memory(model, trainer, load, device_bytes, counted)

    last = planned(micro_batches)
    first = planned(1) if micro_batches > 1 else last
    peak, names = last.peak_bytes, list(last.moments)
    resident, _ = state_bytes(trainer, counted or count_parameters(model, trainer.lora))
    states = last.moments[last.fullest]["optimizer state"] - resident

    def room(used: int) -> int:
        return states + int(FREE_SHARE * max(0, peak - used))

    def used(plan: MemoryPlan, name: str, without: tuple[str, ...] = ()) -> int:
        return sum(size for kind, size in plan.moments[name].items() if kind not in without)

    # `first` omits the unsharded gradients that `reduce_gradients` "step" accumulates.
    has_whole = trainer.needs_fsdp and trainer.fsdp.reduce_gradients == "step"
    back = last if has_whole else first
    # maximum used bytes from each moment to the step's end
    most = list(accumulate((used(last, name) for name in reversed(names)), max))[::-1]
    forward, backward, arriving = [], [], []
    for layer in range(model.num_layers):
        name = f"block {layer}, backward"
        position = names.index(name)
        forward.append(room(used(first, name, ("gradients", "reduction"))))
        backward.append(room(max(used(back, one) for one in names[position : position + 2])))
        arriving.append(room(most[position]))
    return StateRooms(
        tuple(forward), room(used(first, "LM head")), tuple(backward), tuple(arriving)
    )
