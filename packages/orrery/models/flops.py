"""Count floating-point operations (FLOPs) of training, with and without recomputation.

L layers · H query heads · K head size · D hidden · V vocabulary

- `model_flops` counts, per token, 6 for each parameter in an active matrix product (2 forward, 4
  backward), including the LM head. Attention adds 12 · L · H · K · n² / 2 per document of n tokens.
- A frozen weight (LoRA) costs 4: forward and input gradient. Adapters are not counted.
- `hardware_flops` adds the recomputation of blocks and logits, and that of scores in attention's
  backward pass (5 products instead of 4).
- Networks of transformers are not counted: the manifest lacks their windows and scans.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model, Trainer


@dataclass(frozen=True)
class Flops:
    projections: float  # attention, dense feed-forwards, routers, shared experts
    experts: float  # grouped products
    attention: float  # scores and their products with values
    lm_head: float

    @property
    def total(self) -> float:
        return self.projections + self.experts + self.attention + self.lm_head


def is_counted(model: Model) -> bool:
    return model.mla is None and model.family != "hugging_face"


def active_parameters(model: Model) -> Flops:
    """Return the parameters in one token's matrix products, without attention.

    Raise OrreryError unless `is_counted`.
    """
    if not is_counted(model):
        raise OrreryError(f"model.family {model.family!r}: its operations are not counted")
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    projections = model.num_layers * model.hidden_size * heads
    experts = 0
    num_dense_layers = model.num_layers
    if (moe := model.moe) is not None:
        num_dense_layers = moe.num_dense_layers
        num_sparse_layers = model.num_layers - num_dense_layers
        expert = 3 * model.hidden_size * moe.expert_intermediate_size
        experts = num_sparse_layers * moe.num_experts_per_token * expert
        router = moe.num_experts * model.hidden_size
        projections += num_sparse_layers * (router + moe.num_shared_experts * expert)
    projections += num_dense_layers * 3 * model.hidden_size * model.intermediate_size
    return Flops(projections, experts, 0, model.vocab_size * model.hidden_size)


def model_flops(model: Model, lengths: Sequence[int], frozen: bool = False) -> Flops:
    """Count one forward and backward pass over documents of `lengths` tokens, all scored."""
    each = (4 if frozen else 6) * sum(lengths)
    active = active_parameters(model)
    attention = 3 * _attention_forward(model, lengths)
    return Flops(active.projections * each, active.experts * each, attention, active.lm_head * each)


def hardware_flops(model: Model, trainer: Trainer, lengths: Sequence[int]) -> Flops:
    """Return `model_flops` plus the recomputation. With LoRA, weights are frozen."""
    base = model_flops(model, lengths, trainer.lora is not None)
    active, forward = active_parameters(model), 2 * sum(lengths)
    recomputed: set[str] = set()
    if trainer.memory.activation_checkpointing.kind != "none":
        recomputed = {"projections", "experts", "attention"} - set(trainer.kept)
    core = _attention_forward(model, lengths)
    return Flops(
        base.projections + ("projections" in recomputed) * active.projections * forward,
        base.experts + ("experts" in recomputed) * active.experts * forward,
        # 2 products forward, 5 backward
        3.5 * core + ("attention" in recomputed) * core,
        base.lm_head + (not trainer.memory.lm_head_keeps_logits) * active.lm_head * forward,
    )


def _attention_forward(model: Model, lengths: Sequence[int]) -> float:
    width = model.num_layers * model.num_heads * model.head_dim
    return 4 * width * sum(length * length for length in lengths) / 2
