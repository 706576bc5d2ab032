"""Measure how fast routed experts go from an engine's answer into a rollout's column.

    python benchmarks/orchestrator/routes.py        # a few seconds

One rollout of 131,072 tokens, 48 layers and 8 experts per token has 50 MB of routes, in one answer
or over several turns. Timed is the decoding of the answers (JSON with a base64 .npy file) into the
rollout's column, in CPU time of one core and wall time.
`benchmarks/transport/pack_and_wire.py` measures the way from there to the trainer.
"""

import base64
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.wire.routed_experts import RouteShape, column, split
from record import parser_of, record

GOAL_GBIT_PER_S = 10.0


def answers(routes: np.ndarray, num_turns: int) -> list[tuple[int, bytes]]:
    """Return (position of the first row, body) of every turn. Split the rows among the turns."""
    bodies = []
    for rows in np.array_split(np.arange(len(routes)), num_turns):
        file = io.BytesIO()
        np.save(file, routes[rows[0] : rows[-1] + 1])
        content = {
            "choices": [
                {
                    "token_ids": [1] * 512,
                    "routed_experts": base64.b64encode(file.getvalue()).decode(),
                }
            ],
            "usage": None,
        }
        bodies.append((int(rows[0]), json.dumps(content, separators=(",", ":")).encode()))
    return bodies


def seconds(
    bodies: list[tuple[int, bytes]], num_tokens: int, shape: RouteShape, wanted: np.ndarray
) -> tuple[float, float]:
    """Return CPU and wall seconds."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    parts = [split(body, start)[1] for start, body in bodies]
    found = column(num_tokens, [part for part in parts if part is not None], shape)
    took = (time.process_time() - cpu_begin, time.perf_counter() - begin)
    if not np.array_equal(found[:-1], wanted) or not (found[-1] == shape.no_route).all():
        raise SystemExit("the column is not what was sent")
    return took


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    shape = RouteShape(48, 8, 128)
    wanted = np.random.default_rng(0).integers(0, 128, (args.tokens - 1, 48, 8), dtype=np.uint8)
    load_before, rows = os.getloadavg()[0], []
    for num_turns in (1, 16):
        bodies = answers(wanted, num_turns)
        took = [seconds(bodies, args.tokens, shape, wanted) for _ in range(args.rounds)]
        rates, on_the_clock = ([wanted.nbytes * 8 / 1e9 / each[i] for each in took] for i in (0, 1))
        rows.append({
            "variant": f"{num_turns} turns", "value": statistics.median(rates), "best": max(rates),
            "on_the_clock": statistics.median(on_the_clock), "rounds": took,
        })  # fmt: skip
    record(
        Path(__file__).with_suffix(".json"),
        figure="routes from answers into a rollout's column, "
        "131,072 tokens × 48 layers × 8 experts",
        value=rows[0]["value"],
        unit="Gb/s of a core",
        goal=GOAL_GBIT_PER_S,
        better="higher",
        details={"load_average_before": load_before, "tokens": args.tokens},
        rows=rows,
    )


if __name__ == "__main__":
    main()
