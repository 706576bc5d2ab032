"""What a step should take, from operations and bytes: each kind of work at the rate that its kernels reach alone on the accelerator.

- Products and attention: executed operations (`orrery.models.flops`), what is computed again included.
- Elementwise work: bytes that kernels read and write, fused as far as neighbours fuse, at the memory's rate; `_elementwise_bytes` counts.
- Communication: bytes that a device sends or receives, at the link's rate. What products can hide costs nothing: the step is the longer
  of computation and communication, plus what cannot hide (the optimizer, and Muon's all-to-alls in it).
- It is a floor to compare with, made of nothing measured in the run itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from orrery.models import build
from orrery.models.flops import hardware_flops, is_counted
from orrery.trainer.bench.request import Request
from orrery.trainer.optim.muon import FUSED, is_block_matrix


@dataclass(frozen=True)
class Rates:
    """Operations a second, and bytes a second, of one device."""

    peak_flops: float  # the data sheet's, dense bfloat16: what utilisation is a share of
    dense_flops: float
    grouped_flops: float
    attention_flops: float
    memory_bytes: float
    link_bytes: float
    host_link_bytes: float


# By torch's name of the device. H200 SXM: rates that single kernels reach there (torch 2.11; large products, 128 experts, cuDNN's attention
# over 32k); the link is what NCCL gathers reach of NVLink's 450 GB/s each way, the host link what pinned copies reach of PCIe 5's 64 GB/s.
RATES = {"NVIDIA H200": Rates(989e12, 650e12, 590e12, 550e12, 4.2e12, 350e9, 50e9)}


def expected(request: Request, lengths: Sequence[int], device: str) -> dict[str, float] | None:
    """Seconds of one step by kind, for documents of `lengths` tokens on a device of this name in all its micro-batches; None where its
    rates are not known, or the model's operations are not counted.

    Under context parallel `lengths` are the group's, of which this device does its share.
    """
    rates = RATES.get(device)
    if rates is None or not is_counted(request.model):
        return None
    model, trainer, mesh = request.model, request.trainer, request.trainer.mesh
    work = hardware_flops(model, trainer, lengths)
    tokens = sum(lengths) / mesh.cp
    blocks, rest = _parameters(request)
    shards = mesh.dp_shard * mesh.cp
    local = (blocks + rest) / shards
    trained = local if trainer.lora is None else 0.0
    seconds = {
        "dense products": work.projections / mesh.cp / rates.dense_flops,
        "grouped products": work.experts / mesh.cp / rates.grouped_flops,
        "attention": work.attention / mesh.cp / rates.attention_flops,
        "lm head": work.lm_head / mesh.cp / rates.dense_flops
        + tokens * model.vocab_size * 22 / rates.memory_bytes,
        "elementwise": tokens * model.num_layers * _elementwise_bytes(request) / rates.memory_bytes,
    }
    computing_s, offloaded_s, dealt_s = (
        _optimizer_s(request, trained, shards, rates) if trained else (0.0, 0.0, 0.0)
    )
    seconds["optimizer"] = max(computing_s, offloaded_s)
    dealing_s = (
        max(computing_s + dealt_s, offloaded_s) - seconds["optimizer"]
    )  # what copies of offloaded states do not hide
    gathers = (2 if trainer.fsdp.reshard_after_forward else 1) * request.micro_batches
    reductions = request.micro_batches if trainer.fsdp.reduce_gradients == "micro_batch" else 1
    over_ranks = (shards - 1) / shards
    gathered = gathers * _bytes(trainer.compute_dtype) * (blocks / mesh.ep + rest) * over_ranks
    reduced = (
        reductions * _bytes(trainer.reduce_dtype) * (blocks / mesh.ep + rest) * over_ranks
        if trained
        else 0.0
    )
    exchanged = 0.0
    if mesh.ep > 1 and model.moe is not None:
        # rows to the experts and back, forward and backward, and again where experts are computed again
        rows = tokens * model.moe.num_experts_per_token * (mesh.ep - 1) / mesh.ep
        passes = 4 + (2 if trainer.memory.activation_checkpointing.kind == "full" else 0)
        exchanged += passes * rows * model.hidden_size * 2 * model.num_layers
    if mesh.cp > 1:
        heads = 2 * model.num_heads + 2 * model.num_kv_heads
        exchanged += (
            3 * tokens * heads * model.head_dim * 2 * model.num_layers * (mesh.cp - 1) / mesh.cp
        )
    communication = (gathered + reduced + exchanged) / rates.link_bytes
    computation = sum(seconds.values()) - seconds["optimizer"]
    return {
        **seconds,
        "communication in all": communication + dealt_s,
        "communication": max(0.0, communication - computation) + dealing_s,
        "step": max(computation, communication) + seconds["optimizer"] + dealing_s,
    }


def _optimizer_s(
    request: Request, trained: float, shards: int, rates: Rates
) -> tuple[float, float, float]:
    """Seconds of its kernels, of offloaded states' copies beside them, and of its all-to-alls, for `trained` float32 values on this device.

    Bytes a value, by the kernels that `optim/` calls:

    - AdamW 28 (weight, gradient and two moments read, three of them written), SGD 20 with momentum and 12 without; for the gradient's norm
      and its scale, which these kernels write too, 12 more.
    - Sign SGD 20 (gradient read, sign written; weight and sign read, weight written), 8 more where weights decay, 4 for the norm.
    - Muon, of the blocks' matrices, 48 (norm 4, scale 8, momentum 12, bfloat16 copy 6, weight decay 8, update 10), 12 more with Nesterov's
      look-ahead; and beside these the products of its iteration: of matrices of m ≤ n, 4·m²·n + 2·m³ a step (X Xᵀ, A A and B X), each
      on one rank. AdamW for the rest.

    Offloaded states, 4 bytes each, cross the host link both ways at once. Muon deals out the matrices that are cut, in bfloat16: of its
    pieces a device sends away all but those of the matrices that it owns, and of these afterwards all but its own pieces.
    """
    optimizer = request.trainer.optimizer
    products_s = dealt_bytes = 0.0
    if optimizer.kind == "muon":
        values, cut, operations = _matrices_of_blocks(request)
        dealt_bytes = 2 * 2 * cut / shards * (shards - 1) / shards
        in_blocks = values / shards
        rest = max(trained - in_blocks, 0.0)
        products_s = optimizer.num_newton_schulz_steps * operations / shards / rates.dense_flops
        num_bytes = in_blocks * (60 if optimizer.nesterov else 48) + rest * 40
        num_states = in_blocks + 2 * rest
    elif optimizer.kind == "adamw":
        num_bytes, num_states = trained * 40, 2 * trained
    elif optimizer.kind == "sgd":
        num_bytes, num_states = (
            (trained * 32, trained) if optimizer.momentum else (trained * 24, 0.0)
        )
    else:
        num_bytes, num_states = trained * (32 if optimizer.weight_decay else 24), 0.0
    offloaded_s = (
        4 * num_states / rates.host_link_bytes if request.trainer.memory.optimizer_offload else 0.0
    )
    return num_bytes / rates.memory_bytes + products_s, offloaded_s, dealt_bytes / rates.link_bytes


def _matrices_of_blocks(request: Request) -> tuple[int, int, float]:
    """Of the matrices that Muon moves: values, those that FSDP cuts (not stacks: between matrices), operations of an iteration's step."""
    values, cut, operations = 0, 0, 0.0
    for name, weight in build(request.model, torch.float32, "meta").named_parameters():
        if is_block_matrix(name, weight):
            rows, columns = weight.shape[-2] // (2 if FUSED.search(name) else 1), weight.shape[-1]
            m, n = sorted((rows, columns))
            values += weight.numel()
            cut += weight.numel() if weight.ndim == 2 else 0
            operations += weight.numel() / (m * n) * (4 * m**2 * n + 2 * m**3)
    return values, cut, operations


def _parameters(request: Request) -> tuple[float, float]:
    """Parameters of the experts, which expert parallel spreads, and of all else."""
    model = request.model
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = float(model.hidden_size * heads)
    experts = 0.0
    if (moe := model.moe) is not None:
        sparse = model.num_layers - moe.num_dense_layers
        expert = 3 * model.hidden_size * moe.expert_intermediate_size
        experts = float(sparse * moe.num_experts * expert)
        rest = model.num_layers * layer + sparse * (
            moe.num_experts * model.hidden_size + moe.num_shared_experts * expert
        )
        rest += moe.num_dense_layers * 3 * model.hidden_size * model.intermediate_size
    else:
        rest = model.num_layers * (layer + 3 * model.hidden_size * model.intermediate_size)
    return experts, rest + (1 if model.tie_embeddings else 2) * model.vocab_size * model.hidden_size


def _elementwise_bytes(request: Request) -> float:
    """Bytes a token and layer, forward and backward, in bfloat16: numbers read and written in one forward pass, thrice.

    Once for the forward pass, twice for the backward pass (values and gradients), once more where cheap results are made again.
    """
    model = request.model
    hidden = model.hidden_size
    numbers = (
        2 * 2 * hidden + 2 * 3 * hidden
    )  # two norms read and write, two residual sums read two and write one
    numbers += (
        2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    )  # head norms and rotation, fused
    if (moe := model.moe) is not None:
        numbers += 2 * moe.num_experts_per_token * hidden  # rows spread over experts
        numbers += (moe.num_experts_per_token + 1) * hidden  # and summed again
        numbers += 3 * moe.num_experts_per_token * moe.expert_intermediate_size  # SwiGLU
    else:
        numbers += 3 * model.intermediate_size
    passes = 3 if request.trainer.memory.activation_checkpointing.kind == "none" else 4
    return 2.0 * numbers * passes


def _bytes(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2}[dtype]
