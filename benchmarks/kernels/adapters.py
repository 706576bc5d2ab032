"""Measure the time that adapters of rank 16 add to frozen experts on one GPU, both passes.

128 experts, 8 a token, hidden 2,048, intermediate 768, bfloat16, 16,384 tokens. Routing is balanced
or skewed (popularity ∝ 1/rank). Results are checked against float32 first, without host syncs.
Timed are both projections: frozen alone, with adapters as a sum of products, and as one operator.
The bound is memory traffic at 4.2 TB/s. Forward: x read, result read and written. Backward:
incoming gradient read twice, x read, x's gradient read and written.

    python benchmarks/kernels/adapters.py
"""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from experts import EXPERTS, HIDDEN, INTERMEDIATE, SLOTS, TOKENS, outcome, routes, timed
from timing import BYTES, record_share, require, smoke_and_device

from orrery.kernels.expert_rows import sort_by_expert
from orrery.kernels.grouped_matmul import (
    adapted_grouped_matmul,
    grouped_matmul,
    reference_grouped_matmul,
)

RANK = 16
GOAL = 0.7  # share of the bound, both projections forward and backward, balanced routing
TOLERANCE = 1e-2  # results and intermediates round to bfloat16: at most 2⁻⁹ each
PROJECTIONS = {"gate_up": (HIDDEN, 2 * INTERMEDIATE), "down": (INTERMEDIATE, HIDDEN)}


def summed(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def op(x: Tensor, a: Tensor, b: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return product(x, weight, ends) + product(product(x, a, ends), b, ends)

    return op


def one(x: Tensor, a: Tensor, b: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return adapted_grouped_matmul(x, weight, a, b, ends)


def frozen(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return grouped_matmul(x, weight, ends)


BACKENDS = {"a sum of products": summed(grouped_matmul), "one operator": one}


def tensors(
    rows: int, experts: int, num_in: int, num_out: int, rank: int, device: str
) -> tuple[list[Tensor], Tensor]:
    """Return x [M, K], a [E, R, K], b [E, N, R], and the frozen weight [E, N, K]."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * std).bfloat16()

    leaves = [
        normal(rows, num_in),
        normal(experts, rank, num_in, std=num_in**-0.5),
        normal(experts, num_out, rank, std=rank**-0.5),
    ]
    return leaves, normal(experts, num_out, num_in, std=num_in**-0.5)


def bound_ms(rows: int, num_in: int, num_out: int) -> tuple[float, float]:
    """Return the bound of the adapters' part, forward and backward."""
    forward, backward = num_in + 2 * num_out, 3 * num_in + 2 * num_out
    return 2e3 * rows * forward / BYTES, 2e3 * rows * backward / BYTES


def main() -> None:
    smoke, device = smoke_and_device("adapters", __doc__)
    experts, slots, tokens = (8, 2, 32) if smoke else (EXPERTS, SLOTS, TOKENS[0])
    projections = {"gate_up": (16, 16), "down": (8, 16)} if smoke else PROJECTIONS
    rank, rows = 8 if smoke else RANK, tokens * slots
    table, errors, shares = [], {}, {}
    for routing in ("balanced", "skewed"):
        expert = routes(tokens, experts, slots, routing == "skewed", device)
        ends = sort_by_expert(expert, experts).ends_E
        added, best = dict.fromkeys(BACKENDS, 0.0), 0.0
        for name, sides in projections.items():
            num_in, num_out = sides
            leaves, weight = tensors(rows, experts, num_in, num_out, rank, device)
            expected = outcome(
                summed(reference_grouped_matmul), [x.float() for x in leaves], weight.float(), ends
            )
            alone = timed(frozen, leaves[:1], weight, ends)
            bound = bound_ms(rows, *sides)
            best += sum(bound)
            found = {"frozen alone": alone}
            for backend, op in BACKENDS.items():
                outcome(op, leaves, weight, ends)  # compilation may sync
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
                actual = outcome(op, leaves, weight, ends)
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
                variant = f"{name}, {backend}, {routing}"
                errors[variant] = require(variant, actual, expected, [TOLERANCE] * 4)
                found[backend] = timed(op, leaves, weight, ends)
                added[backend] += sum(found[backend]) - sum(alone)
            for backend, (forward_ms, backward_ms) in found.items():
                table.append(
                    {
                        "variant": f"{name}, {backend}, {routing}",
                        "value": forward_ms + backward_ms,
                        "unit": "ms",
                        "goal": None,
                        "forward_ms": forward_ms,
                        "backward_ms": backward_ms,
                        "bound_of_what_adapters_add_ms": bound,
                    }
                )
                print(
                    f"{table[-1]['variant']}: {forward_ms:.3f} + {backward_ms:.3f} ms", flush=True
                )
        shares[routing] = {
            backend: {"added_ms": ms, "of_the_bound": best / ms} for backend, ms in added.items()
        }
        for backend, ms in added.items():
            print(
                f"{routing}: {backend} adds {ms:.3f} ms, {best / ms:.0%} of the bound", flush=True
            )
    if smoke:
        return
    record_share(
        Path(__file__).with_suffix(".json"),
        figure="Adapters of rank 16 beside a mixture's frozen experts, forward and backward, "
        "16,384 tokens: share of the bound",
        value=shares["balanced"]["one operator"]["of_the_bound"],
        goal=GOAL,
        details={
            "triton": version("triton"),
            "rank": rank,
            "errors_against_float32": errors,
            "by_routing": shares,
        },
        rows=table,
    )


if __name__ == "__main__":
    main()
