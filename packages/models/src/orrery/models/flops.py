"""Work of training: floating-point operations that a model's own formula asks for, and those that a memory lever makes of it.

L layers · H query heads · K head size · D hidden · V vocabulary

- True operations a token: 6 for each parameter of an active matrix product (2 forward, 4 backward; LM head included, embedding not), and
  for attention 12 · L · H · K · n² / 2 for a causal document of n tokens. What is computed again counts nothing: a model FLOP
  utilisation made of these cannot be raised by recomputing.
- Of a frozen weight (LoRA) only forward and input gradient are needed: 4. Adapters are left out; they are a thousandth.
- Executed operations add what is computed again: blocks under checkpointing, logits in the LM head's backward pass, and scores inside
  attention's backward pass (5 products instead of 4).
- Networks of transformers are not counted (`is_counted`): the manifest has no windows, scans, experts or feed-forwards of other shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model, Trainer


@dataclass(frozen=True)
class Flops:
    """Floating-point operations by the kind of kernel that does them."""

    projections: float  # dense products of blocks: attention's four, dense feed-forwards, routers, shared experts
    experts: float  # grouped products
    attention: float  # scores and their products with values
    lm_head: float

    @property
    def total(self) -> float:
        return self.projections + self.experts + self.attention + self.lm_head


def is_counted(model: Model) -> bool:
    return model.mla is None and model.family != "hugging_face"


def active_parameters(model: Model) -> Flops:
    """Parameters of the matrix products that one token passes; `attention` has none. Raises OrreryError where they are not counted."""
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
        projections += num_sparse_layers * (
            moe.num_experts * model.hidden_size + moe.num_shared_experts * expert
        )
    projections += num_dense_layers * 3 * model.hidden_size * model.intermediate_size
    return Flops(projections, experts, 0, model.vocab_size * model.hidden_size)


def model_flops(model: Model, lengths: Sequence[int], frozen: bool = False) -> Flops:
    """Training one forward and one backward pass over documents of `lengths` tokens, every token scored."""
    each, tokens = (4 if frozen else 6), sum(lengths)
    active = active_parameters(model)
    return Flops(
        active.projections * each * tokens,
        active.experts * each * tokens,
        3 * _core(model, lengths),
        active.lm_head * each * tokens,
    )


def hardware_flops(model: Model, trainer: Trainer, lengths: Sequence[int]) -> Flops:
    """The same with what `trainer` computes again; weights beside adapters are frozen."""
    true, active, tokens = (
        model_flops(model, lengths, trainer.lora is not None),
        active_parameters(model),
        sum(lengths),
    )
    memory = trainer.memory
    again: set[str] = set()
    if memory.activation_checkpointing.kind != "none":
        again = {"projections", "experts", "attention"} - set(trainer.kept)
    core = _core(model, lengths)
    return Flops(
        true.projections + ("projections" in again) * 2 * active.projections * tokens,
        true.experts + ("experts" in again) * 2 * active.experts * tokens,
        # 2 products forward, 5 backward
        3.5 * core + ("attention" in again) * core,
        true.lm_head + (not memory.lm_head_keeps_logits) * 2 * active.lm_head * tokens,
    )


def _core(model: Model, lengths: Sequence[int]) -> float:
    """One forward pass of causal attention: two products over half of the square of each document."""
    return (
        4
        * model.num_layers
        * model.num_heads
        * model.head_dim
        * sum(length * length for length in lengths)
        / 2
    )
