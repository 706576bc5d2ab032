"""Measure rollout tokens/s through orchestrator and router, against the same engine alone.

    python benchmarks/orchestrator/overhead.py            # on a quiet machine; about 4 minutes

- Alone: a minimal client keeps the same number of requests in flight, with the same prompts and
  sampling, and only counts tokens.
- Through both: the orchestrator's own loop behind vllm-router. Its trainer takes every batch at
  once and never publishes, so generation never waits for training.
- Both read the engine's own count of generated tokens over the same time. Rounds alternate. The
  figure is the median ratio of neighbouring rounds.
"""

import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.identity import canonical_json
from orrery.manifest.schema import Manifest
from orrery.orchestrator import assemble
from orrery.orchestrator.__main__ import event_loop
from orrery.orchestrator.engines.pool import EnginePool
from orrery.orchestrator.loop import Loop
from orrery.orchestrator.scheduler import Scheduler
from orrery.runtime.role_context import RoleContext, parse_role
from orrery.tasks import make
from orrery.tasks.chat import Renderer, write_tokenizer
from orrery.wire.columns import Columns
from orrery.wire.rollout_wire import Batch
from orrery.wire.weight_wire import (
    WeightPublisher,
    WeightWatch,
    read_weights,
    remove_weight_dir,
    weight_dir,
)
from record import parser_of, record
from roles import ENGINE, ROUTER, roles

ROOT = Path(__file__).parents[2]
GOAL = 0.9
NEVER = 1_000_000  # steps


def manifest(name: str, concurrency: int, max_tokens: int) -> Manifest:
    """Return the run `name` with one engine behind a router, no end, and minimal evaluations."""
    content = json.loads((ROOT / "manifests" / f"{name}.json").read_text())
    content["inference"] |= {"num_replicas": 1, "max_num_sequences": concurrency}
    content["inference"]["router"] = {
        "kind": "vllm_router",
        "policy": "round_robin",
        "balance_abs_threshold": None,
        "balance_rel_threshold": None,
    }
    content["trainer"]["checkpoint"]["interval_steps"] = NEVER
    content["stages"] |= {"sft": None}
    content["stages"]["rl"] = {"num_steps": NEVER}
    settings = content["orchestrator"]
    settings |= {
        "max_off_policy_steps": NEVER,
        "drop_zero_advantage_groups": False,
        "max_batches_ahead": 4,
    }
    settings["admission"] = {"kind": "fixed", "max_in_flight": concurrency}
    settings["sampling"]["max_tokens_per_turn"] = max_tokens
    settings["evaluation"] = {
        "interval_steps": NEVER,
        "num_problems": 1,
        "rollouts_per_problem": 1,
        "stop_at": None,
    }
    return Manifest.model_validate(content)


class InstantTrainer:
    """A trainer that takes every batch at once and reads it as the wire would."""

    url = "none"

    def __init__(self) -> None:
        self.num_batches, self.num_bytes = 0, 0

    async def wanted(self, at_least: int = -1) -> int:
        return self.num_batches + 1

    async def send(self, batch: Batch) -> None:
        self.num_batches += 1
        for rank in batch.micro_batches:
            for micro_batch in rank:
                for part in cast(Sequence[Columns], micro_batch):
                    self.num_bytes += sum(
                        column.nbytes for column in (*part.token.values(), *part.sample.values())
                    )


@contextmanager
def stage(spec: Manifest, commands: Mapping[str, Sequence[str]]) -> Iterator[RoleContext]:
    """Start roles on random weights, and stop them at the end. Yield the orchestrator's context.

    `commands` maps each role to its command line.
    """
    import torch

    from orrery.models import build, weights

    with tempfile.TemporaryDirectory(prefix="orrery-overhead-") as folder:
        run_dir = Path(folder)
        (run_dir / "manifest.json").write_bytes(canonical_json(spec))
        init = run_dir / "weights" / "init"
        network = build(spec.model, torch.float32, torch.device("cpu"))
        weights.initialize(network, spec.model)
        init.mkdir(parents=True)
        weights.save(network, spec.model, init)
        write_tokenizer(spec.model, init)
        ctx = parse_role("orchestrator", ["--run-dir", str(run_dir), "--stage", "rl"])
        try:
            publisher = WeightPublisher(weight_dir(ctx.run_dir, ctx.attempt))
            publisher.publish(0, read_weights(init))
            with roles(run_dir, commands):
                yield ctx
        finally:
            remove_weight_dir(ctx.run_dir, ctx.attempt)
            ctx.metrics.close()


def loop_of(ctx: RoleContext, pool: EnginePool) -> Loop:
    """Return the orchestrator's loop with a trainer that takes each batch at once."""
    return Loop(
        ctx,
        Scheduler(ctx.manifest),
        assemble.tasks(ctx.manifest),
        Renderer(assemble.policy_dir(ctx, "init")),
        pool,
        WeightWatch(weight_dir(ctx.run_dir, ctx.attempt)),
        InstantTrainer(),
    )


async def metered(pool: EnginePool, warm_up_s: float, seconds: float) -> float:
    """Return the engine's generated tokens/s over `seconds`, after `warm_up_s`."""
    await asyncio.sleep(warm_up_s)
    first, start = (await pool.metrics())[0].generation_tokens_total, time.perf_counter()
    await asyncio.sleep(seconds)
    return ((await pool.metrics())[0].generation_tokens_total - first) / (
        time.perf_counter() - start
    )


async def direct(ctx: RoleContext, pool: EnginePool, warm_up_s: float, seconds: float) -> float:
    """Run a minimal client without a router, on the task's prompts."""
    import aiohttp

    settings, use = ctx.manifest.orchestrator, ctx.manifest.tasks.train[0]
    task, renderer = make(use), Renderer(assemble.policy_dir(ctx, "init"))
    group_size = settings.algorithm.group_size
    sampling = {
        "max_tokens": settings.sampling.max_tokens_per_turn,
        "temperature": settings.sampling.temperature,
        "logprobs": 0,
        "detokenize": False,
        "skip_special_tokens": False,
        "stop_token_ids": renderer.stop_token_ids,
    }
    numbers = itertools.count()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def worker() -> None:
            while True:
                problem = task.problem(next(numbers) // group_size)
                body = {
                    "token_ids": renderer.prompt(problem.messages, problem.tools),
                    "cache_salt": "direct",
                    "sampling_params": sampling,
                }
                async with session.post(
                    f"{pool.engines[0].url}/inference/v1/generate", json=body
                ) as answer:
                    answer.raise_for_status()
                    await answer.read()

        workers = [asyncio.create_task(worker()) for _ in range(settings.admission.max_in_flight)]
        try:
            meter = asyncio.create_task(metered(pool, warm_up_s, seconds))
            await asyncio.wait([meter, *workers], return_when=asyncio.FIRST_COMPLETED)
            for each in workers:
                if each.done():
                    each.result()
            return await meter
        finally:
            for each in workers:
                each.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def orchestrated(
    ctx: RoleContext, pool: EnginePool, warm_up_s: float, seconds: float
) -> float:
    """Run the orchestrator's loop through the router."""
    running = asyncio.create_task(loop_of(ctx, pool).run())
    meter = asyncio.create_task(metered(pool, warm_up_s, seconds))
    await asyncio.wait([running, meter], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        meter.cancel()
        running.result()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return await meter


async def measure(
    ctx: RoleContext, rounds: int, warm_up_s: float, seconds: float
) -> list[dict[str, float]]:
    rows = []
    for number in range(rounds):
        # Make a new pool, because a pool that has loaded this version would wait for the next.
        async with await assemble.engine_pool(ctx) as pool:
            row = {
                "direct": await direct(ctx, pool, warm_up_s, seconds),
                "orchestrated": await orchestrated(ctx, pool, warm_up_s, seconds),
            }
        rows.append(row | {"ratio": row["orchestrated"] / row["direct"]})
        print(
            f"round {number + 1} of {rounds}: {row['direct']:.0f} tokens/s directly, "
            f"{row['orchestrated']:.0f} through both",
            flush=True,
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--run", default="reverse_text", help="which checked-in run's model and task"
    )
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up-s", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument(
        "--dry-run", action="store_true", help="measure, but do not write the record"
    )
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    spec = manifest(args.run, args.concurrency, args.max_tokens)
    with (
        stage(spec, {"inference": ENGINE, "router": ROUTER}) as ctx,
        asyncio.Runner(loop_factory=event_loop) as runner,
    ):
        rows = runner.run(measure(ctx, args.rounds, args.warm_up_s, args.seconds))
    value = statistics.median(row["ratio"] for row in rows)
    print(f"{value:.3f} of the engine's own rate (goal {GOAL})")
    if not args.dry_run:
        record(
            Path(__file__).with_suffix(".json"),
            figure="rollout tokens/s through orchestrator and router, "
            "as a share of the same engine's driven directly",
            value=value,
            unit="share",
            goal=GOAL,
            better="higher",
            details={
                "rounds": rows,
                "load_average_before": load_before,
                **{key: value for key, value in vars(args).items() if key != "dry_run"},
            },
        )


if __name__ == "__main__":
    main()
