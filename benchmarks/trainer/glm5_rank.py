"""Time what one rank computes in a step of GLM-5 at 131,072 tokens, a part at a time, on one GPU.

The rank has a quarter of the document's tokens (cp 4) and 32 of the 256 experts (ep 8), in the FP8
layers of `FP8`. Copies replace collectives (`context_rank.Turns`), so no network is measured.

- A layer's time is that of a stack over the number of layers. Its forward pass runs twice, because
  checkpointing recomputes it. Its bound counts each product once, at the rate of its type.
- Balanced: each expert gets equally many rows. Skewed: the fullest rank's rows, if an expert of
  rank r (from 1) in popularity is drawn with weight 1 / (r + `SKEW`).
- The step is all layers and the LM head. Optimizer, embedding and gathers of weights are left out.

    python benchmarks/trainer/glm5_rank.py        # 2 minutes; --smoke: tiny sizes on a CPU
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from context_rank import (
    NUM_RANKS,
    TOKENS,
    Share,
    Turns,
    chooses_in_fp8,
    key_widths,
    network,
    random_keys,
)
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from timing import GEMM_FLOPS, copy_out, milliseconds, profiled, smoke_and_device

from orrery.kernels.expert_rows import sort_by_expert
from orrery.kernels.token_logprob import token_logprob
from orrery.manifest.budget.parameters import block_weights
from orrery.manifest.identity import load
from orrery.manifest.schema import Model
from orrery.models.causal_lm import TransformerBlock
from orrery.models.fp8 import WeightCache
from orrery.models.latent_attention import LatentAttention
from orrery.models.layers import Experts
from orrery.trainer.parallel import blocks, gathered_keys
from orrery.trainer.parallel.gathered_keys import GatheredKeys
from record import ROOT, record

RECORD = Path(__file__).with_suffix(".json")
FP8 = ["attention", "feed_forward", "experts"]
FP8_FLOPS = 2 * GEMM_FLOPS
EXPERT_RANKS, SKEW = 8, 32
STACKED = 4
GOAL = 0.55  # of the bound, an MoE layer


class OtherRanks(Turns):
    """Give one rank the same random keys of the others in each pass."""

    def all_gather_into_tensor(self, out: Tensor, local: Tensor, **_: Any) -> "Turns":
        # A recomputation gathers no indexer keys.
        every = [self.sent[rank][:, : local.shape[1]] for rank in range(NUM_RANKS)]
        every[self.now] = local
        torch.cat(every, out=out)
        return self

    def all_to_all_single(self, arriving: Tensor, leaving: Tensor, **_: Any) -> "Turns":
        arriving.copy_(leaving)
        return self


def rank_model(smoke: bool) -> Model:
    """Return the model with one rank's experts."""
    data = network(smoke).model_dump(mode="json")
    data["moe"]["num_experts"] //= EXPERT_RANKS
    if smoke:
        data |= {"vocab_size": 64, "intermediate_size": 32}
        data["moe"]["expert_intermediate_size"] = 16
    return Model.model_validate(data | {"fp8": None if smoke else FP8})


def make_layers(model: Model, index: int, count: int, like: Tensor) -> nn.ModuleList:
    """Return blocks of kind `index` with random weights, as a trainer with cp and ep runs them."""
    torch.manual_seed(0)
    with torch.device(like.device):
        layers = nn.ModuleList(TransformerBlock(model, index) for _ in range(count))
    for name, weight in layers.named_parameters():
        torch.nn.init.ones_(weight) if "norm" in name else torch.nn.init.normal_(weight, std=0.02)
    layers = layers.to(like.dtype)
    trainer = load(ROOT / "manifests" / "glm5_run.json").trainer
    if not like.is_cuda:
        trainer = trainer.model_copy(update={"compile": False})
    blocks.apply(SimpleNamespace(network=SimpleNamespace(layers=layers, config=model)), trainer)  # type: ignore[arg-type]
    return layers


def layer_bound_ms(model: Model, index: int, share: Share) -> float:
    """Return the least time of both passes: products by type, attention, and choice of keys."""
    flops = {"fp8": 0.0, "bf16": 0.0}
    for weight in block_weights(model, index):
        kind = "fp8" if weight.part in (model.fp8 or ()) and weight.has_fp8 else "bf16"
        active: float = weight.size
        if weight.part == "experts":
            active *= model.mixture.num_experts_per_token / model.mixture.num_experts
        passes = 0 if weight.part == "norm" else 1 if weight.part == "indexer" else 3
        flops[kind] += passes * 2.0 * active * len(share.source)
    mla, (key, width), position = model.latent, key_widths(model), share.source + 1
    assert mla.indexer is not None
    pairs = position.clamp(max=mla.indexer.top_k).double().sum().item() * model.num_heads
    flops["bf16"] += 2.0 * pairs * (key + mla.kv_lora_rank)
    flops["bf16"] += 2.0 * pairs * (3 * key + 2 * mla.kv_lora_rank)
    scored = position.double().sum().item()
    kind = "fp8" if chooses_in_fp8(model, share.x) else "bf16"
    flops[kind] += 2.0 * mla.indexer.num_heads * width * scored
    return 1e3 * (flops["fp8"] / FP8_FLOPS + flops["bf16"] / GEMM_FLOPS)


def timed(name: str, call: Callable[[], Any], bound_ms: float, count: int = 1) -> dict[str, Any]:
    ms = milliseconds(call, 3) / count
    print(f"{name}: {ms:.2f} ms, bound {bound_ms:.3g} ms, {bound_ms / ms:.3g}", flush=True)
    row = {"variant": name, "unit": "of the bound", "value": bound_ms / ms}
    return {**row, "ms": ms, "bound_ms": bound_ms, **profiled(call, count)}


def time_layers(
    name: str, model: Model, index: int, share: Share, turns: Turns, count: int
) -> dict[str, Any]:
    layers = make_layers(model, index, count, share.x)
    for module in layers.modules():
        if isinstance(module, LatentAttention):
            module.keys = GatheredKeys(turns, keeps=False)  # type: ignore[arg-type]
    if model.fp8:
        WeightCache(layers).refresh()
    grad_TD = torch.randn_like(share.x)
    moe = model.mixture
    slot = torch.arange(len(share.source) * moe.num_experts_per_token, device=share.x.device)
    balanced_TK = (slot % moe.num_experts).view(len(share.source), -1)
    turns.now = int(share.rank or 0)

    def both() -> None:
        layers.zero_grad()
        share.x.grad = None
        hidden, choice = share.x, None
        for layer in layers:
            routes = balanced_TK if index >= moe.num_dense_layers else None
            hidden, _, choice = layer(hidden, share.angles, share.documents, routes, choice)
        hidden.backward(grad_TD)

    return timed(name, both, layer_bound_ms(model, index, share), count)


def fullest_rank(model: Model, num_slots: int) -> Tensor:
    """Return the experts of the slots that the fullest of the expert-parallel ranks gets."""
    here = model.mixture.num_experts
    generator = torch.Generator().manual_seed(0)
    weight = 1 / (torch.arange(EXPERT_RANKS * here).double() + 1 + SKEW)
    weight = weight[torch.randperm(len(weight), generator=generator)]
    drawn = weight.multinomial(EXPERT_RANKS * num_slots, True, generator=generator)
    rank = int(torch.bincount(drawn // here, minlength=EXPERT_RANKS).argmax())
    return drawn[drawn // here == rank] % here


def time_experts(model: Model, share: Share) -> list[dict[str, Any]]:
    moe, like, width = model.mixture, share.x, model.hidden_size
    with torch.device(like.device):
        experts = Experts(
            moe.num_experts, width, moe.expert_intermediate_size, "experts" in (model.fp8 or ())
        )
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    experts = experts.to(like.dtype)
    if model.fp8:
        WeightCache(experts).refresh()
    num_slots, rows = len(share.source) * moe.num_experts_per_token, []
    balanced = torch.arange(num_slots) % moe.num_experts
    cases = {"balanced": balanced, "skewed": fullest_rank(model, num_slots)}
    for name, expert in cases.items():
        order = sort_by_expert(expert[:, None].to(like.device), moe.num_experts, experts.row_block)
        x = torch.randn(len(expert), width, device=like.device).to(like.dtype).requires_grad_()
        score = torch.rand(len(expert), 1, device=like.device)
        grad = torch.randn_like(x)

        def both(x: Tensor = x, given: tuple = (score, order), grad: Tensor = grad) -> None:
            experts.zero_grad()
            x.grad = None
            experts(x, *given).backward(grad)

        flops = 6.0 * len(expert) * 3 * width * moe.expert_intermediate_size
        rate = FP8_FLOPS if model.fp8 else GEMM_FLOPS
        row = timed(f"experts, {name}, both passes", both, 1e3 * flops / rate)
        rows.append(row | {"rows": len(expert)})
    return rows


def time_head(model: Model, share: Share, chunk_tokens: int) -> dict[str, Any]:
    like = share.x
    hidden = torch.randn_like(like).requires_grad_()
    weight = torch.randn(model.vocab_size, model.hidden_size, device=like.device).to(like.dtype)
    weight.mul_(0.02).requires_grad_()
    target = torch.randint(model.vocab_size, (len(hidden),), device=like.device)
    ones = torch.ones(len(hidden), device=like.device)

    def both() -> None:
        hidden.grad = weight.grad = None
        token_logprob(hidden, weight, target, ones, chunk_tokens)[0].sum().backward()

    flops = 6.0 * len(hidden) * weight.numel()
    return timed("LM head, both passes", both, 1e3 * flops / GEMM_FLOPS)


def main() -> None:
    smoke, device = smoke_and_device("glm5_rank", __doc__)
    turns, model, tokens = OtherRanks(), rank_model(smoke), 256 if smoke else TOKENS
    dtype = torch.float32 if smoke else torch.bfloat16
    x_TD = torch.randn(tokens, model.hidden_size, device=device).to(dtype)
    share = Share(model, x_TD, [tokens], 1)
    del x_TD
    for rank in range(NUM_RANKS):
        turns.sent[rank] = random_keys(model, share.x)
    first = model.mixture.num_dense_layers
    with patch.object(gathered_keys, "dist", turns):
        moe = time_layers("MoE layer, both passes", model, first, share, turns, STACKED)
        dense = time_layers("dense layer, both passes", model, 0, share, turns, 1)
    moe["goal"] = GOAL
    rows = [moe, dense, *time_experts(model, share), time_head(model, share, 1024)]
    counts = ((model.num_layers - first, moe), (first, dense), (1, rows[-1]))
    ms, bound_ms = (sum(n * row[key] for n, row in counts) for key in ("ms", "bound_ms"))
    step = {"variant": "step", "unit": "of the bound", "value": bound_ms / ms}
    print(f"step: {ms:.1f} ms, bound {bound_ms:.3g} ms")
    if smoke:
        return
    record(
        RECORD,
        figure="a rank of GLM-5 at 131,072 tokens, an MoE layer's both passes",
        value=moe["value"],
        unit="of the bound",
        goal=GOAL,
        better="higher",
        details={"tokens": tokens, "cp": NUM_RANKS, "ep": EXPERT_RANKS, "stacked": STACKED},
        rows=[*rows, {**step, "ms": ms, "bound_ms": bound_ms}],
    )
    copy_out(RECORD)


if __name__ == "__main__":
    main()
