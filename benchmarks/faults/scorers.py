"""Measure the cost of scoring each model-written answer in its own fork.

The cost is the CPU time of scorer and fork, and the wait for the score. The families have scorers
that run answers (`eval`), parse them (sympy) or compare text. One scorer gets one answer at a time.
Each problem has eight answers, one of them right, like a group of rollouts. Start-up is excluded.
"""

import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.tasks.reasoning_gym import Family
from orrery.tasks.scorer_pool import HASH_SEED, ScorerPool
from record import parser_of, record

FAMILIES = {
    "spiral_matrix": "eval",
    "countdown": "sympy",
    "polynomial_multiplication": "sympy",
    "leg_counting": "text",
}
GROUP = 8
GOAL_MS = 30.0


def processor_s(process: psutil.Process) -> float:
    """Return the CPU seconds of the scorer and all its forks so far."""
    return sum(process.cpu_times()[:4])


async def measured(scorers: ScorerPool, family: str, num_problems: int) -> dict[str, Any]:
    items = [(seed, Family(family, {}).dataset(seed)[0]) for seed in range(num_problems)]
    answers = [
        ([family, {}, seed, item["question"]], item["answer"] if i == 0 else str(i))
        for seed, item in items
        for i in range(GROUP)
    ]
    await scorers.score("reasoning_gym", *answers[0])
    process = psutil.Process(scorers._idle["reasoning_gym"][0].process.pid)
    before, waits_ms = processor_s(process), []
    for answer in answers:
        begin = time.perf_counter()
        await scorers.score("reasoning_gym", *answer)
        waits_ms.append(1e3 * (time.perf_counter() - begin))
    used_ms = 1e3 * (processor_s(process) - before) / len(answers)
    p99_ms = statistics.quantiles(waits_ms, n=100)[-1]
    return {
        "processor_ms": used_ms,
        "wait_median_ms": statistics.median(waits_ms),
        "wait_p99_ms": p99_ms,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--problems", type=int, default=50)
    args = parser.parse_args()
    load_before, scorers = os.getloadavg()[0], ScorerPool()

    async def every() -> dict[str, dict[str, Any]]:
        return {family: await measured(scorers, family, args.problems) for family in FAMILIES}

    found = asyncio.run(every())
    record(
        Path(__file__).with_suffix(".json"),
        figure=(
            "processor time of a model-written answer scored in a process of its own, the "
            "dearest of four families"
        ),
        value=max(row["processor_ms"] for row in found.values()),
        unit="ms",
        goal=GOAL_MS,
        better="lower",
        details={
            "answers_a_family": args.problems * GROUP,
            "load_average_before": load_before,
            "families": FAMILIES,
        },
        rows=[
            {
                "variant": family,
                "value": row["processor_ms"],
                "unit": "ms",
                "better": "lower",
                "goal": GOAL_MS,
                **row,
            }
            for family, row in found.items()
        ],
    )


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:  # otherwise the scorer draws other problems
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": HASH_SEED}
        )
    main()
