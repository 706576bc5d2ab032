"""Measure the CPU time of a short single-turn rollout, with and without shared requests.

    python benchmarks/orchestrator/rollout_cost.py        # on a CPU, about 2 minutes

- A group is the rollouts of one problem. `shared`: one engine request samples all rollouts of a
  group that start together. `single`: each rollout is its own request.
- Both variants use one engine, the orchestrator's own loop and a trainer that takes each batch at
  once. The network is tiny, so requests take most of the time. Rounds of the variants alternate.
- The figure is the CPU time of API server and orchestrator per rollout. Other programs on the
  machine change this time little, but lower the rollouts/s.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from overhead import loop_of, manifest, stage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from orrery.manifest.schema import Manifest
from orrery.orchestrator import assemble
from orrery.orchestrator.__main__ import event_loop
from orrery.orchestrator.dispatch import Request
from orrery.orchestrator.rollout import Failed, Rollout
from orrery.runtime.role_context import RoleContext
from record import parser_of, record
from roles import ALONE, ENGINE

SINGLE, SHARED = "single", "shared"
WARM_UP_S = 3.0
PARTS = ("api_server", "engine_core", "orchestrator")


def spent_s(server: psutil.Process) -> dict[str, float]:
    """Return the CPU seconds that each process of `PARTS` has used so far."""
    found = zip(PARTS, ([server], server.children(), [psutil.Process()]), strict=True)
    times = {name: [process.cpu_times() for process in each] for name, each in found}
    return {name: sum(one.user + one.system for one in each) for name, each in times.items()}


def variants(spec: Manifest) -> dict[str, Manifest]:
    """Return the orchestrator's manifest for each variant.

    The orchestrator puts at most `max_num_sequences` samples in a request. The engine runs `spec`.
    """
    inference = spec.inference.model_copy(update={"max_num_sequences": 1})
    return {SINGLE: spec.model_copy(update={"inference": inference}), SHARED: spec}


async def costs(ctx: RoleContext, spec: Manifest, seconds: float) -> dict[str, float]:
    """Return the CPU microseconds of a rollout by process, and the rollouts/s."""
    ctx.manifest = spec
    # A pool that has loaded this weight version would wait for the next, so make a new pool.
    async with await assemble.engine_pool(ctx) as pool:
        endpoint = ctx.run_dir / "stages/rl/endpoints/inference.0.json"
        server = psutil.Process(json.loads(endpoint.read_text())["pid"])
        loop, num_ended = loop_of(ctx, pool), 0
        end = loop.runner.on_ended

        def on_ended(request: Request, outcome: Rollout | Failed) -> None:
            nonlocal num_ended
            num_ended += isinstance(outcome, Rollout)
            end(request, outcome)

        loop.runner.on_ended = on_ended
        running = asyncio.create_task(loop.run())
        await asyncio.wait([running], timeout=WARM_UP_S)
        before, num_before, begin_s = spent_s(server), num_ended, time.perf_counter()
        await asyncio.wait([running], timeout=seconds)
        after, num_rollouts = spent_s(server), num_ended - num_before
        row = {"rollouts_per_s": num_rollouts / (time.perf_counter() - begin_s)}
        if running.done():
            running.result()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    return row | {name: 1e6 * (after[name] - before[name]) / num_rollouts for name in PARTS}


async def measure(
    ctx: RoleContext, rounds: int, seconds: float
) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {SINGLE: [], SHARED: []}
    specs = variants(ctx.manifest)
    for number in range(rounds):
        for name, spec in specs.items():
            found[name].append(await costs(ctx, spec, seconds))
            numbers = ", ".join(f"{key} {value:.0f}" for key, value in found[name][-1].items())
            print(f"round {number + 1} of {rounds}, {name}: {numbers}", flush=True)
    return found


def row(name: str, rounds: list[dict[str, float]]) -> dict[str, object]:
    medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    value = medians["api_server"] + medians["orchestrator"]
    return {
        "variant": name,
        "value": value,
        "unit": "us",
        "better": "lower",
        "goal": None,
    } | medians


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--run", default="reverse_text", help="which checked-in run's model")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--dry-run", action="store_true", help="measure, but write no record")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    spec = manifest(args.run, args.concurrency, args.max_tokens)
    spec = Manifest.model_validate(
        spec.model_dump() | {"inference": spec.inference.model_dump() | ALONE}
    )
    with (
        stage(spec, {"inference": ENGINE}) as ctx,
        asyncio.Runner(loop_factory=event_loop) as runner,
    ):
        found = runner.run(measure(ctx, args.rounds, args.seconds))
    rows = [row(name, rounds) for name, rounds in found.items()]
    print(json.dumps(rows, indent=1))
    if not args.dry_run:
        record(
            Path(__file__).with_suffix(".json"),
            figure="processor time of API server and orchestrator a rollout of "
            f"{args.max_tokens} tokens, groups of {spec.orchestrator.algorithm.group_size}",
            value=rows[-1]["value"],
            unit="us",
            goal=None,
            better="lower",
            rows=rows,
            details={
                "load_average_before": load_before,
                **{key: value for key, value in vars(args).items() if key != "dry_run"},
            },
        )


if __name__ == "__main__":
    main()
