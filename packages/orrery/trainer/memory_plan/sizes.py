"""Sizes for the memory plan: a block's activations, and parameters by FSDP unit.

Activations are in bytes a token of this rank.

c bytes of the compute dtype · D hidden · h = query heads · head size · g = key heads · head size
F dense (or shared) intermediate · E experts · K experts a token · I expert intermediate

Blocks of transformers networks count as our dense blocks: too little if attention keeps scores.
"""

from dataclasses import dataclass

import torch
from torch import nn

from orrery.manifest.schema import Lora, Model, Trainer
from orrery.models import build, expert_modules, fsdp_units, lora
from orrery.trainer.parallel.compiled import is_one_graph


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes a token: `kept` from forward to backward, and the most that `backward` adds."""

    kept: int
    backward: int


@dataclass(frozen=True)
class _Results:
    """Bytes of a block's results: `named` for checkpointing, and `rest`.

    No backward pass reads the `unread` part of `named`. Only attention's reads `for_attention`.
    """

    named: dict[str, int]
    unread: dict[str, int]
    rest: int
    for_attention: int


def activation_bytes(model: Model, trainer: Trainer, layer: int) -> ActivationBytes:
    """Return a block's activation bytes under the trainer's checkpointing.

    `none` keeps all results, `full` the input (c·D), `selective` also the named results. A block
    with exchanges keeps the unread results too: they have no name inside its graphs.
    """
    results = _results(model, trainer, layer)
    entry = dtype_bytes(trainer.compute_dtype) * model.hidden_size
    every = entry + sum(results.named.values()) + results.rest
    attention, feed_forward = _temporaries(model, trainer, layer)
    if trainer.memory.activation_checkpointing.kind == "none":
        return ActivationBytes(every, max(attention, feed_forward))
    is_graph = is_one_graph(trainer, model)
    kept = entry + sum(results.named[name] for name in trainer.kept)
    if not is_graph:
        kept += sum(results.unread[name] for name in trainer.kept)
    again = max(0, every - kept)
    if "attention" not in trainer.kept or not is_graph:
        return ActivationBytes(kept, again + max(attention, feed_forward))
    # Attention's inputs are recomputed after the feed-forward's backward pass.
    late = results.for_attention
    return ActivationBytes(kept, max(late + attention, again - late + feed_forward))


def dtype_bytes(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def is_sparse(model: Model, layer: int) -> bool:
    return model.moe is not None and layer >= model.moe.num_dense_layers


def _results(model: Model, trainer: Trainer, layer: int) -> _Results:
    """Return the bytes of a block's results.

        attention     c·h output · 4 · query heads log-sum-exps
        projections   c·(h + 2g) queries, keys, values · c·D output · c·2F gate and up
                      · 4·E router logits
        experts       c·2·K·I gate and up
        rest          c·2D normalised inputs · c·(h + g) rotated queries and keys · c·F activation
                      · c·K·D rows in expert order · c·K·I activation · statistics, row orders

    An adapter repeats its projection's result and adds its narrow result. A frozen product without
    an adapter needs no input.
    """
    c, hidden = dtype_bytes(trainer.compute_dtype), model.hidden_size
    h, g = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    adapted = () if trainer.lora is None else trainer.lora.targets
    rank = 0 if trainer.lora is None else trainer.lora.rank

    def copies(target: str) -> int:
        return 2 if target in adapted else 1

    def reads_input(target: str) -> bool:
        return trainer.lora is None or target in adapted

    def narrow(target: str, count: int) -> int:
        return c * rank * count if target in adapted else 0

    named = {"attention": c * h + 4 * model.num_heads, "experts": 0}
    inputs = c * (h + 2 * g) * copies("attention") + narrow("attention", 3)
    named["projections"] = inputs + c * hidden * copies("attention") + narrow("attention", 1)
    unread = {"attention": 0, "projections": 0, "experts": 0}
    rest = c * hidden * reads_input("attention") + 8
    if model.qk_norm:
        rest += c * (h + g) + 4 * (model.num_heads + model.num_kv_heads)
    for_attention = rest + (0 if "projections" in trainer.kept else inputs)
    dense = _dense_width(model, layer)
    if dense:
        named["projections"] += c * 2 * dense * copies("feed_forward") + narrow("feed_forward", 3)
        unread["projections"] += c * hidden
        # Without the compiler silu's output stays too.
        rest += c * dense * (reads_input("feed_forward") + (not trainer.compile))
    rest += c * hidden * (reads_input("feed_forward") or not dense)
    if is_sparse(model, layer):
        moe = model.mixture
        top_k, inner = moe.num_experts_per_token, moe.expert_intermediate_size
        named["projections"] += 4 * moe.num_experts
        named["experts"] = c * top_k * 2 * inner + narrow("experts", 2 * top_k)
        unread["experts"] = c * top_k * hidden
        rest += c * top_k * (hidden + inner) * reads_input("experts") + 20 * top_k + 8
        rest += 4 * moe.num_experts * (not trainer.compile)
    return _Results(named, unread, rest, for_attention)


def _dense_width(model: Model, layer: int) -> int:
    if not is_sparse(model, layer):
        return model.intermediate_size
    return model.mixture.num_shared_experts * model.mixture.expert_intermediate_size


def _temporaries(model: Model, trainer: Trainer, layer: int) -> tuple[int, int]:
    """Return the temporary bytes of attention's backward pass and of the feed-forward's.

    attention   c·(3h + 2g) gradients · 4·h float32 sums of the queries'
    dense       c·(3F + D)
    mixture     also c·K·D gradients of rows (thrice under ep) · c·K·I between products (thrice
                unless one graph) · c·K·D to recompute the down projection with adapters
    """
    c = dtype_bytes(trainer.compute_dtype)
    h, g = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = c * (3 * h + 2 * g) + 4 * h
    feed_forward = c * (3 * _dense_width(model, layer) + model.hidden_size)
    if not is_sparse(model, layer):
        return attention, feed_forward
    moe, lora_spec = model.mixture, trainer.lora
    rows = 1 if trainer.mesh.ep == 1 else 3  # exchanged rows have copies in both orders
    has_adapters = lora_spec is not None and "experts" in lora_spec.targets
    is_checkpointed = trainer.memory.activation_checkpointing.kind != "none"
    if has_adapters and is_checkpointed and "experts" not in trainer.kept:
        rows += 1
    between = 1 if is_one_graph(trainer, model) else 3
    per_slot = rows * model.hidden_size + between * moe.expert_intermediate_size
    return attention, feed_forward + c * moe.num_experts_per_token * per_slot


@dataclass(frozen=True)
class UnitParameters:
    """Parameter counts of an FSDP unit. `adapted` are frozen with adapters."""

    trained: int = 0
    frozen: int = 0
    trained_experts: int = 0
    frozen_experts: int = 0
    adapted: int = 0

    @property
    def total(self) -> int:
        return self.trained + self.frozen

    def gathered(self, ep: int) -> int:
        """Return the parameters on one rank when gathered: no experts of other ep ranks."""
        experts = self.trained_experts + self.frozen_experts
        return self.total - experts + experts // ep

    def gathered_trained(self, ep: int) -> int:
        return self.trained - self.trained_experts + self.trained_experts // ep


@dataclass(frozen=True)
class ParameterCounts:
    """FSDP units in forward order. With tied embeddings `root` has both ends.

    `largest_in_a_layer`: parameters of the largest trained weight, such as a stack of experts.
    """

    before: UnitParameters
    layers: tuple[UnitParameters, ...]
    after: UnitParameters
    root: UnitParameters
    largest_in_a_layer: int

    @property
    def units(self) -> tuple[UnitParameters, ...]:
        return self.before, *self.layers, self.after, self.root


def count_parameters(model: Model, adapters: Lora | None) -> ParameterCounts:
    """Count on the manifest's network, without storage.

    Raise OrreryError if it cannot be built, as without transformers.
    """
    network = build(model, torch.float32, "meta")
    if adapters is not None:
        lora.adapt(network, adapters, torch.float32)
    experts = {id(weight) for module in expert_modules(network) for weight in module.parameters()}
    adapted = {id(network.get_parameter(name)) for name, _ in lora.adapters(network)}
    counted: set[int] = set()

    def count(modules: list[nn.Module]) -> UnitParameters:
        found = {"trained": 0, "frozen": 0, "trained_experts": 0, "frozen_experts": 0, "adapted": 0}
        for weight in (weight for module in modules for weight in module.parameters()):
            if id(weight) in counted:
                continue
            counted.add(id(weight))
            kind = "trained" if weight.requires_grad else "frozen"
            found[kind] += weight.numel()
            found[f"{kind}_experts"] += weight.numel() if id(weight) in experts else 0
            found["adapted"] += weight.numel() if id(weight) in adapted else 0
        return UnitParameters(**found)

    layers = list(network.layers)
    groups = fsdp_units(network)
    first = next(index for index, unit in enumerate(groups) if unit[0] is layers[0])
    before = count([module for unit in groups[:first] for module in unit])
    middle = tuple(count(groups[first + index]) for index in range(len(layers)))
    after = count([module for unit in groups[first + len(layers) :] for module in unit])
    in_layers = (weight for layer in layers for weight in layer.parameters())
    largest = max((weight.numel() for weight in in_layers if weight.requires_grad), default=0)
    return ParameterCounts(before, middle, after, count([network]), largest)
