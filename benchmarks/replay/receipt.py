"""Measure how fast routes become a column and pass the trainer's check, on one core.

An answer of 131,072 tokens, 48 layers and 8 experts a token holds 50 MB of routes, as base64 of a
.npy file. The orchestrator decodes them into the rollout's column; the trainer checks them once.
`benchmarks/transport/pack_and_wire.py` measures the way between. The figure is the orchestrator's
part in bytes of routes a second of processor time. The check is recorded too.

    python benchmarks/replay/receipt.py
"""

import base64
import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from orrery.wire.routed_experts import RouteShape, check_routes, column, split

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import parser_of, record

SHAPE = RouteShape(num_layers=48, top_k=8, num_experts=128)
TOKENS = 131_072
ROUNDS = 12
GOAL = 10.0


def answer(routes: np.ndarray) -> bytes:
    """Return an answer's body as vLLM writes it, with the routes alone."""
    file = io.BytesIO()
    np.save(file, routes)
    return b'{"choices":[{"routed_experts":"' + base64.b64encode(file.getvalue()) + b'"}]}'


def gigabits(call: Callable[[], Any], num_bytes: int) -> float:
    rates = []
    for _ in range(ROUNDS):
        begin_s = time.process_time()
        call()
        rates.append(8e-9 * num_bytes / (time.process_time() - begin_s))
    return statistics.median(rates)


def main() -> None:
    parser_of(__doc__).parse_args()
    said = np.random.default_rng(0).integers(
        0, SHAPE.num_experts, (TOKENS - 1, SHAPE.num_layers, SHAPE.top_k), dtype=np.uint8
    )
    body = answer(said)

    def taken() -> np.ndarray:
        _, routes = split(body, 0)
        assert routes is not None
        return column(TOKENS, [routes], SHAPE)

    routes = taken()
    assert (
        np.array_equal(routes[:-1], said)
        and check_routes(routes, SHAPE, "batch 1").is_missing.sum() == 1
    )
    decoded = gigabits(taken, routes.nbytes)
    checked = gigabits(lambda: check_routes(routes, SHAPE, "batch 1"), routes.nbytes)
    record(
        Path(__file__).with_suffix(".json"),
        figure="routes of an engine's answer, decoded into a rollout's column "
        "(131,072 tokens, 48 layers, 8 of 128 experts, one core)",
        value=decoded,
        unit="Gb/s of processor time",
        goal=GOAL,
        better="higher",
        details={
            "bytes": routes.nbytes,
            "characters": len(body),
            "rounds": ROUNDS,
            "check_gigabits_per_s": checked,
        },
    )


if __name__ == "__main__":
    main()
