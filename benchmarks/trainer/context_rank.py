"""Check and time one rank's share of a latent attention layer under context parallelism.

GLM-5's sizes: 64 heads, latent keys of 576 and indexer keys of 128 values, top-k 2,048. Each of
four ranks has 32,768 of a document's 131,072 tokens in zig-zag order, and all keys. The ranks run
one after the other in this process, and copies replace collectives, so no network is measured.

- Check: outputs, chosen keys and gradients of four ranks equal those of one rank with all tokens.
  Two runs have equal bits.
- Timed: forward and backward pass of the layer, and their parts, each with its lower bound. The
  choice of keys is timed on each rank. Its imbalance is the slowest rank's time over the mean, − 1.

    python benchmarks/trainer/context_rank.py
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from sparse_index import unturned
from timing import (
    BYTES,
    GEMM_FLOPS,
    copy_out,
    milliseconds,
    require,
    smoke_and_device,
)

from orrery.kernels import sparse_index_fp8
from orrery.kernels.attention import Documents
from orrery.kernels.sparse_index import select_keys
from orrery.kernels.sparse_mla import sparse_mla
from orrery.manifest.identity import load
from orrery.manifest.schema import Model
from orrery.models.latent_attention import ChosenKeys, LatentAttention
from orrery.models.layers import rotary_angles
from orrery.trainer.parallel import gathered_keys
from orrery.trainer.parallel.context_parallel import zigzag_of_whole
from orrery.trainer.parallel.gathered_keys import GatheredKeys, KeyOrder
from record import ROOT, record

RECORD = Path(__file__).with_suffix(".json")
NUM_RANKS = 4
TOKENS = 131_072
CHECKED_LENGTHS = [2560, 1024, 256, 256]  # multiples of 8, so that no rank pads
CHECKED_TOP_K = 512
# float64: only the order of sums differs. bfloat16: four ranks get the keys that one rank chose.
TOLERANCES = {torch.float64: 1e-10, torch.bfloat16: 2e-2}
SLOW_S = 4
GOAL = 0.02  # largest imbalance of the choice of keys


class Turns:
    """Replace torch.distributed for ranks that run one after the other.

    A collective uses the tensor of each rank's latest call. For a rank that has made no call, it
    uses the current rank's tensor.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.now = 0
        self.sent: dict[int, Tensor] = {}
        self.returned: dict[int, Tensor] = {}

    def size(self) -> int:
        return NUM_RANKS

    def rank(self) -> int:
        return self.now

    def all_gather_into_tensor(self, out: Tensor, local: Tensor, **_: Any) -> "Turns":
        self.sent[self.now] = local.detach().clone()
        torch.cat([self.sent.get(rank, local) for rank in range(NUM_RANKS)], out=out)
        return self

    def all_to_all_single(self, arriving: Tensor, leaving: Tensor, **_: Any) -> "Turns":
        self.returned[self.now] = leaving.detach().clone()
        own = [self.returned.get(rank, leaving) for rank in range(NUM_RANKS)]
        torch.cat([each.chunk(NUM_RANKS)[self.now] for each in own], out=arriving)
        return self

    def wait(self) -> None:
        pass


def network(smoke: bool, top_k: int | None = None) -> Model:
    data = load(ROOT / "manifests" / "glm5_run.json").model.model_dump(mode="json")
    mla = data["mla"]
    if smoke:
        data |= {"hidden_size": 48, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
        widths = {"q_lora_rank": 24, "kv_lora_rank": 20, "nope_head_dim": 12, "rope_head_dim": 4}
        mla |= {**widths, "value_head_dim": 12}
        mla["indexer"] |= {"num_heads": 4, "head_dim": 8, "top_k": 16}
    if top_k is not None:
        mla["indexer"]["top_k"] = top_k
    return Model.model_validate(data)


def make_layer(model: Model, dtype: torch.dtype, device: str) -> LatentAttention:
    torch.manual_seed(0)
    with torch.device(device):
        return LatentAttention(model, 0).to(dtype)


class Share:
    """The tokens of one rank, or all tokens if `rank` is None."""

    def __init__(self, model: Model, x_TD: Tensor, lengths: list[int], rank: int | None) -> None:
        total = torch.tensor([0, *lengths]).cumsum(0)
        source, offsets = torch.arange(int(total[-1])), total.int()
        if rank is not None:
            shard = zigzag_of_whole(lengths, NUM_RANKS, rank)
            assert shard.is_real.all()
            source, offsets = torch.from_numpy(shard.source), torch.from_numpy(shard.cu_seqlens)
        position = source - total[torch.searchsorted(total, source, right=True) - 1]
        self.rank, self.source = rank, source.to(x_TD.device)
        self.chosen: Tensor | None = None
        self.x = x_TD[self.source].detach().requires_grad_()
        self.documents = Documents(offsets.to(x_TD.device), max(lengths))
        position = position.to(x_TD.device)
        width = model.latent.rope_head_dim
        self.angles = rotary_angles(position, width, model.rope_theta, x_TD.dtype)

    def run(self, layer: LatentAttention, turns: Turns) -> tuple[Tensor, Tensor]:
        if self.rank is not None:
            turns.now = self.rank
        given = None if self.chosen is None else ChosenKeys(self.chosen)
        out, choice = layer(self.x, self.angles, self.documents, given)
        return out, choice.chosen_TK


def outcome(
    layer: LatentAttention, shares: list[Share], turns: Turns, grad_TD: Tensor
) -> list[Tensor]:
    """Run both passes of each rank in `shares`. `grad_TD` is the gradient of the output.

    Return [outputs, gradient of x, *gradients of weights, chosen keys], each in token order.
    """
    outputs, chosen = torch.empty_like(grad_TD), []
    layer.zero_grad()
    for share in shares:
        share.x.grad = None
        out, chosen_TK = share.run(layer, turns)
        out.backward(grad_TD[share.source])
        outputs[share.source] = out.detach()
        chosen.append((share.source, chosen_TK.sort(dim=1).values))
    gradient = torch.empty_like(grad_TD)
    choice = chosen[0][1].new_empty(len(grad_TD), chosen[0][1].shape[1])
    for share, (source, each) in zip(shares, chosen, strict=True):
        assert share.x.grad is not None
        gradient[source], choice[source] = share.x.grad, each
    weights = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    return [outputs, gradient, *weights, choice]


def check(turns: Turns, dtype: torch.dtype, smoke: bool, device: str) -> dict[str, Any]:
    """Return a row: four ranks' largest relative error against one rank. Exit if a check fails."""
    lengths = [80, 32, 8] if smoke else CHECKED_LENGTHS
    model = network(smoke, None if smoke else CHECKED_TOP_K)
    layer = make_layer(model, dtype, device)
    sizes = (sum(lengths), model.hidden_size)
    x_TD, grad_TD = (torch.randn(*sizes, device=device).to(dtype) for _ in range(2))
    turns.clear()
    wanted = outcome(layer, [Share(model, x_TD, lengths, None)], turns, grad_TD)
    layer.keys = GatheredKeys(turns, keeps=False)  # type: ignore[arg-type]
    shares = [Share(model, x_TD, lengths, rank) for rank in range(NUM_RANKS)]
    if dtype == torch.bfloat16:
        layer.indexer = None
        for share in shares:
            share.chosen = wanted[-1][share.source]
    for _ in range(2):  # round 1 collects all ranks' keys, round 2 their gradients
        outcome(layer, shares, turns, grad_TD)
    found, again = (outcome(layer, shares, turns, grad_TD) for _ in range(2))
    *found, found_choice = found
    *wanted, wanted_choice = wanted
    tolerance = TOLERANCES[dtype]
    what = f"four ranks in {dtype}"
    errors = require(what, found, wanted, [tolerance] * len(found))
    same = all(torch.equal(one, other) for one, other in zip(found, again, strict=False))
    if not same:
        raise SystemExit(f"{what}: two runs have different bits")
    if not torch.equal(found_choice, wanted_choice):
        raise SystemExit(f"{what}: choices of keys differ from one rank's")
    return {"variant": f"check, {what}", "unit": "of the norm", "value": max(errors.values())}


def timed(name: str, ms: float, bound_ms: float) -> dict[str, Any]:
    row = {"variant": name, "unit": "ms", "value": ms, "bound_ms": bound_ms}
    print(f"{name}: {ms:.2f} ms, bound {bound_ms:.2f} ms", flush=True)
    return {**row, "share_of_bound": bound_ms / ms}


def time_share(turns: Turns, smoke: bool, device: str) -> list[dict[str, Any]]:
    tokens = 256 if smoke else TOKENS
    model, dtype = network(smoke), torch.float32 if smoke else torch.bfloat16
    layer = make_layer(model, dtype, device)
    layer.keys = GatheredKeys(turns, keeps=False)  # type: ignore[arg-type]
    x_TD = torch.randn(tokens, model.hidden_size, device=device).to(dtype)
    shares = [Share(model, x_TD, [tokens], rank) for rank in range(NUM_RANKS)]
    del x_TD
    turns.clear()
    for rank in range(NUM_RANKS):  # random keys of all ranks, because only one runs the layer
        turns.sent[rank] = random_keys(model, shares[rank].x)
    rows = parts(model, shares, turns)
    share = shares[1]
    grad_TD = torch.randn_like(share.x)

    def both() -> None:
        share.run(layer, turns)[0].backward(grad_TD)

    bound = {row["variant"]: row.get("bound_ms", 0.0) for row in rows}
    weights = {True: 0, False: 0}  # numbers of trained and of frozen weights
    for weight in layer.parameters():
        weights[weight.requires_grad] += weight.numel()
    product_ms = {key: 2e3 * len(share.x) * n / GEMM_FLOPS for key, n in weights.items()}
    forward = product_ms[True] + product_ms[False] + bound["choice of keys, rank 1"]
    forward += bound["sparse attention, forward"]
    backward = 2 * product_ms[True] + bound["sparse attention, backward"]
    with torch.no_grad():
        forward_ms = once(lambda: share.run(layer, turns))
    both_ms = once(both)
    return [
        *rows,
        timed("layer, forward", forward_ms, forward),
        timed("layer, forward and backward", both_ms, forward + backward),
    ]


def once(call: Callable[[], Any]) -> float:
    """Return the ms of a second call. If the first takes over `SLOW_S` seconds, return its ms."""
    for _ in range(2):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if seconds > SLOW_S:
            break
    return seconds * 1e3


def key_widths(model: Model) -> list[int]:
    mla = model.latent
    assert mla.indexer is not None
    return [mla.kv_lora_rank + mla.rope_head_dim, mla.indexer.head_dim]


def chooses_in_fp8(model: Model, like: Tensor) -> bool:
    indexer = model.latent.indexer
    assert indexer is not None
    return sparse_index_fp8.supports(like, indexer.num_heads, indexer.head_dim)


def random_keys(model: Model, like: Tensor) -> Tensor:
    """Return latent and indexer keys as a rank sends them, one row a token of `like` [t, D]."""
    latent, index = (torch.randn(len(like), w, device=like.device) for w in key_widths(model))
    if chooses_in_fp8(model, like):
        value, scale = unturned(index[:, None])
        index = sparse_index_fp8.pack(value, scale, like.dtype)
    return torch.cat((latent.to(like.dtype), index.to(like.dtype)), dim=1)


def parts(model: Model, shares: list[Share], turns: Turns) -> list[dict[str, Any]]:
    """Return rows: times of the choice of keys on each rank, and of the other parts on rank 1."""
    indexer, widths = model.latent.indexer, key_widths(model)
    assert indexer is not None
    gathered = torch.cat([turns.sent[rank] for rank in range(NUM_RANKS)])
    rows, times, count, device = [], [], len(shares[0].source), gathered.device
    heads = indexer.num_heads
    q_TJI = torch.randn(count, heads, widths[1], device=device).to(gathered.dtype)
    weight_TJ = torch.randn(count, heads, device=device)
    products, rate = 2.0 * heads * widths[1], GEMM_FLOPS
    if chooses_in_fp8(model, gathered):
        q_TJI, scale_TJ = unturned(q_TJI)
        weight_TJ, rate = weight_TJ * scale_TJ, 2 * GEMM_FLOPS
    for share in shares:
        order = KeyOrder.of(share.documents, count, NUM_RANKS, int(share.rank or 0), True)
        kv_SW, k_SI = (x[order.row] for x in gathered.tensor_split(widths[:1], dim=1))
        given = (q_TJI, k_SI, weight_TJ, order.first, order.last, indexer.top_k)
        scored = (order.last - order.first + 1).double().sum().item()
        times.append(once(lambda given=given: select_keys(*given)))  # type: ignore[misc]
        name = f"choice of keys, rank {share.rank}"
        rows.append(timed(name, times[-1], 1e3 * products * scored / rate))
        if share.rank == 1:
            rows += rest(model, order, kv_SW, select_keys(*given), gathered)
    imbalance = max(times) / (sum(times) / len(times)) - 1
    name = "imbalance of the choice of keys"
    row = {"variant": name, "unit": "of the mean", "value": imbalance, "goal": GOAL}
    print(f"{name}: {imbalance:.4f}", flush=True)
    return [*rows, row]


def rest(
    model: Model, order: KeyOrder, kv_SW: Tensor, chosen: Tensor, gathered: Tensor
) -> list[dict[str, Any]]:
    """Return rows: times of a rank's reordering of keys, attention, and sum of key gradients."""
    mla, heads, device = model.latent, model.num_heads, kv_SW.device
    q = torch.randn(len(chosen), heads, kv_SW.shape[1], device=device).to(kv_SW.dtype)
    q.requires_grad_()
    kv = kv_SW.detach().requires_grad_()
    given = (q, kv, chosen, model.head_dim**-0.5, mla.kv_lora_rank)
    out = sparse_mla(*given)[0]
    grad = torch.randn_like(out)
    key, value = kv.shape[1], mla.kv_lora_rank
    pairs = 2.0 * (chosen >= 0).sum().item() * heads
    forward = 1e3 * pairs * (key + value) / GEMM_FLOPS
    backward = 1e3 * pairs * (3 * key + 2 * value) / GEMM_FLOPS
    leaving = torch.empty_like(kv_SW)

    def give_back() -> Tensor:
        leaving.index_copy_(0, order.row, kv_SW)
        return leaving.unflatten(0, (NUM_RANKS, -1)).sum(0, dtype=torch.float32)

    with torch.no_grad():
        times = [
            ("order of gathered keys", milliseconds(lambda: gathered[order.row]), gathered, 2),
            ("return of gradients", milliseconds(give_back), kv_SW, 3),
        ]
        core_ms = milliseconds(lambda: sparse_mla(*given), 3)
    back_ms = milliseconds(lambda: torch.autograd.grad(out, (q, kv), grad, retain_graph=True), 3)
    rows = [
        timed(name, ms, 1e3 * passes * x.numel() * x.element_size() / BYTES)
        for name, ms, x, passes in times
    ]
    return [
        *rows,
        timed("sparse attention, forward", core_ms, forward),
        timed("sparse attention, backward", back_ms, backward),
    ]


def main() -> None:
    smoke, device = smoke_and_device("context_rank", __doc__)
    turns, rows = Turns(), []
    with patch.object(gathered_keys, "dist", turns):
        for dtype in (torch.float64, torch.bfloat16):
            rows.append(check(turns, dtype, smoke, device))
            print(rows[-1], flush=True)
        rows += time_share(turns, smoke, device)
    if smoke:
        return
    layer_ms = next(row["value"] for row in rows if row["variant"] == "layer, forward and backward")
    record(
        RECORD,
        figure="a latent attention layer of one of four context-parallel ranks, both passes",
        value=layer_ms,
        unit="ms",
        goal=None,
        better="lower",
        details={"tokens": TOKENS, "ranks": NUM_RANKS},
        rows=rows,
    )
    copy_out(RECORD)


if __name__ == "__main__":
    main()
