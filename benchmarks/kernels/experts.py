"""Time a mixture of experts on one GPU: each step, and the whole layer.

Steps: plan, gather, gate-up product, activation, down product, combine. 128 experts, 8 a token,
hidden 2,048, intermediate 768, bfloat16, 16,384 and 65,536 tokens. Routing is balanced or skewed
(popularity ∝ 1/rank). Each backend's layer is checked against float32 on 16,384 tokens first,
without host syncs. Backends: aten, compiled (at 16,384 tokens), Triton. A step's bound is the
greater of its FLOPs at 650 TFLOP/s and its bytes, each tensor once, at 4.2 TB/s.

- `local parts`: what a rank does for an exchange of tokens beside sending: plan, gather, combine.
- `exchange`: `LAYERS` layers with the trainer's exchange in a group of one rank, per layer. Its
  lengths are known in advance, or the host waits for them in each layer.

    python benchmarks/kernels/experts.py
"""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import BYTES, GEMM_FLOPS, milliseconds, record_share, require, smoke_and_device

from orrery.kernels.expert_rows import (
    HAS_TRITON,
    combine_rows,
    gather_rows,
    order_slots,
    reference_combine_rows,
    reference_gather_rows,
    reference_order_slots,
    reference_swiglu_rows,
    sort_by_expert,
    swiglu_rows,
)
from orrery.kernels.grouped_matmul import grouped_matmul, reference_grouped_matmul
from orrery.models.layers import Experts
from orrery.trainer.parallel.expert_parallel import TorchExchange, agree_on_lengths

TOKENS = (16_384, 65_536)  # the reference and compiled code use the first
EXPERTS, SLOTS, HIDDEN, INTERMEDIATE = 128, 8, 2_048, 768
GOAL = 0.8  # share of the bound: the layer at 16,384 balanced tokens, local parts at 65,536
LAYERS = 8
TOLERANCE = 1e-2  # four intermediates a pass round to bfloat16: at most 2⁻⁹ each


def routes(tokens: int, experts: int, slots: int, skewed: bool, device: str) -> Tensor:
    """Return expert ids [T, K], distinct within a token.

    Each expert is equally frequent, or if `skewed` drawn by popularity 1/rank without replacement.
    """
    generator = torch.Generator(device).manual_seed(0)
    if skewed:
        uniform = torch.rand(tokens, experts, generator=generator, device=device).clamp_min(1e-9)
        popularity = -torch.arange(1, experts + 1, device=device).log()
        return (popularity - (-uniform.log()).log()).topk(slots, dim=1).indices
    expert = (torch.arange(tokens * slots, device=device) % experts).view(tokens, slots)
    return expert[torch.randperm(tokens, generator=generator, device=device)]


def tensors(
    tokens: int, experts: int, slots: int, hidden: int, intermediate: int, device: str
) -> list[Tensor]:
    """Return x [T, D], float32 scores [T, K], gate and up [E, 2·I, D], down [E, D, I]."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * std).bfloat16()

    scores = torch.rand(tokens, slots, generator=generator, device=device)
    return [
        normal(tokens, hidden),
        scores / scores.sum(1, keepdim=True),
        normal(experts, 2 * intermediate, hidden, std=hidden**-0.5),
        normal(experts, hidden, intermediate, std=intermediate**-0.5),
    ]


def layer(backend: Any) -> Callable[..., Tensor]:
    def experts(x: Tensor, score: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor) -> Tensor:
        rows = sort_by_expert(expert, gate_up.shape[0])
        act = swiglu_rows(
            grouped_matmul(gather_rows(x, rows, backend), gate_up, rows.ends_E),
            order_slots(score, rows),
            backend,
        )
        return combine_rows(grouped_matmul(act, down, rows.ends_E), rows, backend)

    return experts


def reference_layer(
    x: Tensor, score: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor
) -> Tensor:
    rows = sort_by_expert(expert, gate_up.shape[0])
    gathered = reference_grouped_matmul(reference_gather_rows(x, rows), gate_up, rows.ends_E)
    act = reference_swiglu_rows(gathered, reference_order_slots(score, rows))
    return reference_combine_rows(reference_grouped_matmul(act, down, rows.ends_E), rows)


def outcome(
    op: Callable[..., Tensor], inputs: list[Tensor], *others: Any, arriving: Tensor | None = None
) -> list[Tensor]:
    """Return output and gradients. The incoming gradient is random unless given."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = op(*leaves, *others)
    if arriving is None:
        arriving = torch.randn(
            out.shape, generator=torch.Generator(out.device).manual_seed(2), device=out.device
        ).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, leaves, arriving.to(out.dtype))]


def check_numbers(
    backends: dict[str, Callable[..., Tensor]],
    sizes: tuple[int, int, int, int],
    tokens: int,
    device: str,
) -> dict[str, Any]:
    found = {}
    experts, slots, hidden, intermediate = sizes
    inputs = tensors(tokens, experts, slots, hidden, intermediate, device)
    for routing in ("balanced", "skewed"):
        expert = routes(tokens, experts, slots, routing == "skewed", device)
        expected = outcome(reference_layer, [x.float() for x in inputs], expert)
        for name, op in backends.items():
            outcome(op, inputs, expert)  # compilation may sync
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            actual = outcome(op, inputs, expert)
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            what = f"{name}, {routing}"
            found[what] = require(what, actual, expected, [TOLERANCE] * 5)
    return found


def timed(op: Callable[..., Tensor], inputs: list[Tensor], *others: Any) -> tuple[float, float]:
    """Return milliseconds forward, and backward (both minus forward)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    arriving = torch.randn_like(op(*leaves, *others).detach())
    forward_ms = milliseconds(lambda: op(*leaves, *others))
    both_ms = milliseconds(lambda: torch.autograd.grad(op(*leaves, *others), leaves, arriving))
    return forward_ms, both_ms - forward_ms


def bounds(tokens: int, sizes: tuple[int, ...]) -> dict[str, tuple[float, float]]:
    """Return bounds in ms, forward and backward, of each step and the whole layer."""
    experts, slots, hidden, intermediate = sizes
    m = tokens * slots

    def product(width_in: int, width_out: int) -> tuple[float, float]:
        num_bytes = 2 * (m * (width_in + width_out) + experts * width_in * width_out)
        forward = max(2 * m * width_in * width_out / GEMM_FLOPS, num_bytes / BYTES)
        return forward, 2 * forward

    move = 2 * (tokens + m) * hidden / BYTES
    found = {
        "plan": (24 * m / BYTES, 0.0),
        "gather": (move, move),
        "gate_up": product(hidden, 2 * intermediate),
        "activation": (2 * 3 * m * intermediate / BYTES, 2 * 5 * m * intermediate / BYTES),
        "down": product(intermediate, hidden),
        "combine": (move, move),
    }
    local = [found[step] for step in ("plan", "gather", "combine")]
    found["layer"] = (sum(f for f, _ in found.values()), sum(b for _, b in found.values()))
    found["local parts"] = (sum(f for f, _ in local), sum(b for _, b in local))
    found["exchange"] = found["layer"]
    return {step: (forward * 1e3, backward * 1e3) for step, (forward, backward) in found.items()}


def steps(
    inputs: list[Tensor], expert: Tensor, compiled: bool, triton: bool
) -> dict[tuple[str, str], tuple[float, float]]:
    """Map (step, backend) to milliseconds forward and backward, each step alone."""
    x, score, gate_up, down = inputs
    rows = sort_by_expert(expert, gate_up.shape[0])
    sort_ms = milliseconds(lambda: sort_by_expert(expert, gate_up.shape[0]))
    found = {("plan", "aten"): (sort_ms, 0.0)}
    x_rows, score_rows = gather_rows(x, rows), order_slots(score, rows)
    gate_up_rows = grouped_matmul(x_rows, gate_up, rows.ends_E)
    act = swiglu_rows(gate_up_rows, score_rows)
    out_rows = grouped_matmul(act, down, rows.ends_E)
    found["gate_up", "grouped"] = timed(grouped_matmul, [x_rows, gate_up], rows.ends_E)
    found["down", "grouped"] = timed(grouped_matmul, [act, down], rows.ends_E)
    moved: dict[str, tuple[Callable[..., Tensor], list[Tensor], tuple[Any, ...]]] = {
        "gather": (gather_rows, [x], (rows,)),
        "activation": (swiglu_rows, [gate_up_rows, score_rows], ()),
        "combine": (combine_rows, [out_rows], (rows,)),
    }
    for step, (op, leaves, others) in moved.items():
        for backend in ("aten", "triton") if triton else ("aten",):
            found[step, backend] = timed(op, leaves, *others, backend)
        if compiled:
            found[step, "compiled"] = timed(_compiled(op), leaves, *others, "aten")
    return found


_COMPILED: dict[Any, Callable[..., Tensor]] = {}


def _compiled(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile each op once for all routings."""
    if op not in _COMPILED:
        _COMPILED[op] = torch.compile(op, fullgraph=True, dynamic=False)
    return _COMPILED[op]


def local_parts(
    found: dict[tuple[str, str], tuple[float, float]], backend: str
) -> tuple[float, float]:
    parts = found["plan", "aten"], found["gather", backend], found["combine", backend]
    return sum(forward for forward, _ in parts), sum(backward for _, backward in parts)


def exchanged(
    inputs: list[Tensor], expert: Tensor, group: dist.ProcessGroup
) -> dict[tuple[str, str], tuple[float, float]]:
    """Map (step, kind of lengths) to milliseconds of a layer, forward and backward."""
    x, score, gate_up, down = inputs
    experts = Experts(gate_up.shape[0], x.shape[1], down.shape[2]).to(x)
    experts.gate_up_proj.data, experts.down_proj.data = gate_up, down
    exchange = TorchExchange(group, gate_up.shape[0])
    lengths = agree_on_lengths([expert], gate_up.shape[0], group, experts.row_block)
    leaves = [x.detach().requires_grad_(), score.detach().requires_grad_(), *experts.parameters()]

    def layers() -> Tensor:
        out = leaves[0]
        for _ in range(LAYERS):
            out = out + exchange(out, leaves[1], expert, experts)
        return out

    found = {}
    for kind, known in (("lengths by layer", None), ("known lengths", lengths)):
        exchange.known = known
        forward_ms = milliseconds(layers)
        both_ms = milliseconds(lambda: torch.autograd.grad(layers(), leaves, x))
        found["exchange", kind] = forward_ms / LAYERS, (both_ms - forward_ms) / LAYERS
    return found


def main() -> None:
    smoke, device = smoke_and_device("experts", __doc__)
    sizes = (8, 2, 16, 8) if smoke else (EXPERTS, SLOTS, HIDDEN, INTERMEDIATE)
    all_tokens = (32,) if smoke else TOKENS
    triton = device == "cuda" and HAS_TRITON
    backends: dict[str, Callable[..., Tensor]] = {"aten": layer("aten")}
    if triton:
        backends["triton"] = layer("triton")
    for name in list(backends):
        backends[f"{name}, compiled"] = torch.compile(layer(name), fullgraph=True, dynamic=False)
    details: dict[str, Any] = dict(
        zip(("experts", "slots", "hidden", "intermediate"), sizes, strict=True)
    )
    details["triton"] = version("triton") if triton else None
    details["errors_against_float32"] = check_numbers(backends, sizes, all_tokens[0], device)
    store = dist.HashStore()
    dist.init_process_group("nccl" if triton else "gloo", store=store, rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    for tokens in all_tokens:
        inputs, best = tensors(tokens, *sizes, device), bounds(tokens, sizes)
        for routing in ("balanced", "skewed"):
            expert = routes(tokens, *sizes[:2], routing == "skewed", device)
            largest = torch.bincount(expert.flatten()).max().item() * sizes[0] / expert.numel()
            details[f"largest_group_over_mean, {tokens} tokens, {routing}"] = largest
            found = steps(inputs, expert, tokens == all_tokens[0], triton)
            for name, op in backends.items():
                if "compiled" not in name or tokens == all_tokens[0]:
                    found["layer", name] = timed(op, inputs, expert)
            fastest = "triton" if triton else "aten"
            found["local parts", fastest] = local_parts(found, fastest)
            found |= exchanged(inputs, expert, dist.group.WORLD)
            for (step, backend), (forward_ms, backward_ms) in found.items():
                rows.append(
                    {
                        "variant": f"{step}, {backend}, {tokens} tokens, {routing}",
                        "value": sum(best[step]) / (forward_ms + backward_ms),
                        "goal": None,  # the best layer at 16,384 balanced tokens gets one
                        "forward_ms": forward_ms,
                        "backward_ms": backward_ms,
                        "forward_bound_ms": best[step][0],
                        "backward_bound_ms": best[step][1],
                    }
                )
                print(
                    f"{rows[-1]['variant']}: {forward_ms:.3f} + {backward_ms:.3f} ms, "
                    f"{rows[-1]['value']:.0%} of the bound",
                    flush=True,
                )
    dist.destroy_process_group()
    if not smoke:
        layers = [row for row in rows if row["variant"].startswith("layer")]
        layers = [row for row in layers if row["variant"].endswith("16384 tokens, balanced")]
        chosen = max(layers, key=lambda row: row["value"])
        chosen["goal"] = GOAL
        for row in rows:
            if row["variant"] == "local parts, triton, 65536 tokens, balanced":
                row["goal"] = GOAL
        record_share(
            Path(__file__).with_suffix(".json"),
            figure="Experts of a mixture forward and backward, share of the bound: "
            f"{chosen['variant']}",
            value=chosen["value"],
            goal=GOAL,
            details=details,
            rows=rows,
        )


if __name__ == "__main__":
    main()
