"""What rollouts cost an engine: tokens/s through the orchestrator's client and the router, with log-probs and routes, against vLLM's own.

- Directly: an engine that returns neither log-probs nor routes, and a client that posts requests and counts tokens. vLLM 0.26 answers them
  in its own way (the engine core tells of every step); 0.32 asks for one final answer itself, so that there, as on a CPU here, our way of
  making that one serves both sides, and the figure is of log-probs, routes, client and router alone.
- Through all: the same engine returning both, `orrery.orchestrator.rollout.play` for every request, by vllm-router; each rollout ends with
  its column of routes in place.
- Between the two (`rows`): each engine asked for log-probs and for one final answer, as our client asks, without router and client. What
  routes cost an engine is the difference of these two: `routes_cost`, the median over rounds of the same number, whose goal is 3 % at
  most. One row more is the second engine driven as the first is: what routes cost vLLM's own way of answering.
- Weights are dummies: the shape is what costs. On a GPU one engine after the other has it to itself; on a CPU both are there and rounds
  alternate. The figure is the median of the ratios of rounds of the same number. A CPU's engine shares its cores with the client, which a
  GPU's does not: no goal there.
- A round holds so many requests in flight all the time: who has an answer asks anew (`steady`). Answers end one by one, as those of a
  run do, so what is done at an answer's end stands beside the sampling of others; were all to end in one step, the engine would wait.

    python benchmarks/inference/throughput.py      # one H200: Qwen3-30B-A3B's shape, 512 in, 512 out, 512 at once
    python benchmarks/inference/throughput.py --only-routes --record routes_cost     # the two that tell what routes cost, and nothing else
    python benchmarks/inference/throughput.py --run reverse_text_moe --tokens 64 --requests 32 --record throughput_cpu
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.identity import canonical_json
from orrery.manifest.schema import Manifest
from orrery.models.families import hf_config
from orrery.observe.process import RoleProcess, parse_role
from orrery.orchestrator import assemble
from orrery.orchestrator.__main__ import event_loop
from orrery.orchestrator.rollout import play
from orrery.tasks.task import Judgement, Message, Problem
from orrery.transport.routed_experts import route_shape
from record import record
from roles import ALONE, ROUTER, roles

ROOT = Path(__file__).parents[2]
GOAL = 0.95
SERVE = (__file__, "--serve")  # an engine of dummies
SPARE_TOKENS = 64  # of cache and context beyond what the requests need
ROUTES_GOAL = 0.03  # of an engine's tokens/s
FINAL = {"logprobs": 0, "output_kind": 2}  # log-probs of what is sampled, and one answer at the end
WITHOUT, WITH = "one final answer with log-probs, no routes", "one final answer with log-probs and routes"
BETWEEN: dict[bool, dict[str, dict[str, int]]] = {False: {WITHOUT: FINAL}, True: {WITH: FINAL, "vLLM's own answers with routes": {}}}
Stages = dict[bool, list[dict[str, float]]]  # rounds, by whether routes were kept
Between = dict[str, list[float]]  # tokens/s of each round, by what is asked for


def manifest(args: argparse.Namespace, routes: bool) -> Manifest:
    """The checked-in run with one engine behind a router, room for all requests at once, and routes or none."""
    content = json.loads((ROOT / "manifests" / f"{args.run}.json").read_text())
    moe, model = content["model"]["moe"], content["model"]
    cpu = content["hardware"]["accelerator"] == "cpu"
    length = 2 * args.tokens + SPARE_TOKENS
    token_bytes = 2 * model["num_layers"] * model["num_kv_heads"] * model["head_dim"] * (4 if cpu else 2)
    content["inference"] |= {
        **ALONE, "max_num_sequences": args.requests, "max_model_len_tokens": length, "enforce_eager": cpu,
        "kv_cache_bytes": token_bytes * args.requests * length, "max_batched_tokens": 1024 if cpu else 8192, "kv_block_tokens": 32,
        "router": {"kind": "vllm_router", "policy": "round_robin", "balance_abs_threshold": None, "balance_rel_threshold": None},
    }  # fmt: skip
    content["orchestrator"]["sampling"]["max_tokens_per_turn"] = args.tokens
    content["hardware"]["num_nodes"] = 1  # one engine, and a trainer that is never started
    content["trainer"]["mesh"] |= {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "ep": 1}
    model["max_positions"] = max(model["max_positions"], length)
    content["trainer"]["memory"]["max_tokens_per_micro_batch"] = max(length, content["trainer"]["memory"]["max_tokens_per_micro_batch"])
    content["inference"]["quantization"] = args.quantization
    content["transport"]["routed_experts"] = routes and moe is not None
    content["stages"]["sft"] = None
    return Manifest.model_validate(content)


def serve_dummies() -> None:
    """This process as an engine whose weights nobody wrote: it reads `config.json` alone."""
    from orrery.inference import __main__ as role

    arguments = role.server_arguments
    role.server_arguments = lambda *given: [*arguments(*given), "--load-format", "dummy"]
    role.main()


def prompt(args: argparse.Namespace, vocab_size: int, number: int, index: int) -> np.ndarray:
    """i32 [tokens], the request `index` of a round; no two share a prefix."""
    return np.random.default_rng((number, index)).integers(0, vocab_size, args.tokens, dtype=np.int32)


def prompts(args: argparse.Namespace, vocab_size: int, number: int) -> np.ndarray:
    """i32 [requests, tokens]"""
    return np.stack([prompt(args, vocab_size, number, index) for index in range(args.requests)])


Ask = Callable[[int, int], Awaitable[int]]  # a request of this number for so many tokens; how many came


async def steady(args: argparse.Namespace, ask: Ask) -> dict[str, float]:
    """Tokens/s with `requests` in flight all the time, each of `tokens` tokens.

    First each lane asks for another length, so that from then on answers end one by one. The clock runs from the last of these until as
    many more answers are there as there are lanes.
    """
    numbers, over, is_open = itertools.count(), asyncio.Event(), args.requests
    begin, tokens = 0.0, 0

    async def lane(index: int) -> None:
        nonlocal begin, tokens, is_open
        await ask(next(numbers), math.ceil(args.tokens * (index + 1) / args.requests))
        is_open -= 1
        if not is_open:
            begin = time.perf_counter()
        while not over.is_set():
            came = await ask(next(numbers), args.tokens)
            if came != args.tokens:
                raise SystemExit(f"{came} tokens came of a request of {args.tokens}")
            if not is_open:
                tokens += came
                if tokens == args.requests * args.tokens:
                    over.set()

    async with asyncio.TaskGroup() as group:
        lanes = [group.create_task(lane(index)) for index in range(args.requests)]
        await over.wait()
        seconds = time.perf_counter() - begin
        for each in lanes:
            each.cancel()
    return {"tokens_per_s": tokens / seconds, "seconds": seconds}


@asynccontextmanager
async def asking(url: str, salt: int, **more: Any) -> AsyncIterator[Callable[[np.ndarray, int], Awaitable[int]]]:
    """A plain client: what posts a prompt and counts the tokens of its answer, with `more` sampling parameters."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(prompt: np.ndarray, max_tokens: int) -> int:
            sampling = {"max_tokens": max_tokens, "temperature": 1.0, "detokenize": False, "ignore_eos": True, **more}
            body = {"token_ids": prompt.tolist(), "cache_salt": str(salt), "sampling_params": sampling}
            async with session.post(f"{url}/inference/v1/generate", json=body, timeout=aiohttp.ClientTimeout(None)) as answer:
                answer.raise_for_status()
                return len(json.loads(await answer.read())["choices"][0]["token_ids"])

        yield post


async def all_at_once(args: argparse.Namespace, url: str, vocab_size: int, number: int, **more: Any) -> int:
    """All requests at once; the tokens that came."""
    async with asking(url, number, **more) as post:
        return sum(await asyncio.gather(*(post(prompt, args.tokens) for prompt in prompts(args, vocab_size, number))))


async def directly(args: argparse.Namespace, url: str, vocab_size: int, number: int, **more: Any) -> dict[str, float]:
    async with asking(url, number, **more) as post:
        return await steady(args, lambda index, tokens: post(prompt(args, vocab_size, number, index), tokens))


class Prompts:
    """Task and chat format of one round: problem i is its prompt i, and every answer is as good as any."""

    stop_token_ids = ()

    def __init__(self, prompt: Callable[[int], np.ndarray]):
        self.of = prompt

    def problem(self, index: int) -> Problem:
        return Problem(index, (Message("user", str(index)),), answer="")

    def prompt(self, messages: Any, tools: Any = ()) -> list[int]:
        return self.of(int(messages[-1].content)).tolist()

    def parse(self, token_ids: list[int]) -> Message:
        return Message("assistant", "")

    async def reply(self, problem: Problem, messages: list[Message]) -> None:
        return None

    def judge(self, problem: Problem, messages: list[Message]) -> Judgement:
        return Judgement(0.0, {})


class Published:
    """The fleet with version 0 on every token: dummies were never published, and a rollout wants to know by whom it was sampled."""

    def __init__(self, fleet: Any):
        self.fleet = fleet

    async def generate(self, token_ids: np.ndarray, **options: Any) -> Any:
        generation = await self.fleet.generate(token_ids, **(options | {"ignore_eos": True}))
        return replace(generation, versions=np.zeros_like(generation.versions))

    async def abort(self, request_ids: list[str]) -> None:
        await self.fleet.abort(request_ids)


async def through_all(args: argparse.Namespace, spec: Manifest, fleet: Any, number: int) -> dict[str, float]:
    task, shape = Prompts(partial(prompt, args, spec.model.vocab_size, number)), route_shape(spec.model)

    async def ask(index: int, tokens: int) -> int:
        rollout = await play(
            task=task, problem_index=index, max_turns=1, renderer=task, engine=Published(fleet),
            sampling=SimpleNamespace(max_tokens_per_turn=tokens, temperature=1.0),
            max_model_len_tokens=spec.inference.max_model_len_tokens,
            cache_salt=str(number), name=f"{number}-{index}", timeout_s=3600.0, routes=shape,
        )  # fmt: skip
        assert rollout.routed_experts is None or (rollout.routed_experts[:-1] < shape.num_experts).all()
        return int(rollout.trained.sum())

    return await steady(args, ask)


async def rounds(args: argparse.Namespace, stages: dict[bool, RoleProcess], seen: Callable[[Stages, Between], None]) -> Stages:
    """Rounds of each of these engines in turn, and then as many of what is between; `seen` hears after each number."""
    rows: Stages = {routes: [] for routes in stages}
    between: Between = {}
    async with AsyncExitStack() as stack:
        fleets = {routes: await stack.enter_async_context(await assemble.fleet(me)) for routes, me in stages.items()}

        async def plain(routes: bool, number: int, **more: Any) -> dict[str, float]:
            return await directly(args, fleets[routes].engines[0].url, stages[routes].manifest.model.vocab_size, number, **more)

        for number in range(0 if args.only_routes else args.rounds):
            for routes, me in stages.items():
                found = await (through_all(args, me.manifest, fleets[routes], number) if routes else plain(routes, number))
                print(f"{'through all' if routes else 'directly'}, round {number}: {found['tokens_per_s']:.0f} tokens/s", flush=True)
                rows[routes].append(found)
            seen(rows, between)
        asked = [(routes, name, more) for routes in stages for name, more in BETWEEN[routes].items() if not args.only_routes or more]
        for number in range(args.rounds):
            for index, (routes, name, more) in enumerate(asked, 1):
                found = await plain(routes, 1000 * index + number, **more)  # prompts of its own
                print(f"{name}, round {number}: {found['tokens_per_s']:.0f} tokens/s", flush=True)
                between.setdefault(name, []).append(found["tokens_per_s"])
            seen(rows, between)
    return rows


@contextmanager
def stage(spec: Manifest, servers: Mapping[str, Sequence[str]]) -> Iterator[RoleProcess]:
    """A run directory whose weights nobody wrote, with its `servers` (commands by role, as `roles` takes them)."""
    with tempfile.TemporaryDirectory(prefix="orrery-throughput-") as folder:
        run_dir = Path(folder)
        (run_dir / "manifest.json").write_bytes(canonical_json(spec))
        init = run_dir / "weights" / "init"
        init.mkdir(parents=True)
        config = hf_config(spec.model) | {"eos_token_id": None, "dtype": spec.inference.dtype}
        (init / "config.json").write_text(json.dumps(config))
        me = parse_role("orchestrator", ["--run-dir", str(run_dir), "--stage", "rl"])
        try:
            with roles(run_dir, servers):
                yield me
        finally:
            me.metrics.close()


def measure(args: argparse.Namespace, cases: tuple[bool, ...], seen: Callable[[Stages, Between], None]) -> Stages:
    with ExitStack() as stack, asyncio.Runner(loop_factory=event_loop) as runner:
        stages = {routes: stack.enter_context(stage(manifest(args, routes), {"inference": SERVE, "router": ROUTER})) for routes in cases}
        return runner.run(rounds(args, stages, seen))


def routes_cost(between: Between) -> float | None:
    """The share of an engine's tokens/s that routes take, where both were measured."""
    pairs = [*zip(between.get(WITHOUT, []), between.get(WITH, []), strict=False)]
    return statistics.median(1 - with_routes / without for without, with_routes in pairs) if pairs else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", default="qwen3_30b_a3b_16k", help="which checked-in run's model and hardware")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt, and of an answer")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none", help="of the engine's weights")
    parser.add_argument("--only-routes", action="store_true", help="measure what routes cost an engine, without client and router")
    parser.add_argument("--record", default="throughput", help="name of the JSON beside this script")
    args = parser.parse_args()

    load_before = os.getloadavg()[0]
    on_cpu = manifest(args, False).hardware.accelerator == "cpu"
    directly_alone: Stages = {}
    found: Between = {}

    def keep(rows: Stages, between: Between) -> None:
        """After each round, so that a session which ends early keeps what it has."""
        found.update(between)
        each_row = [{"variant": name, "value": statistics.median(each), "unit": "tokens/s", "rounds": each} for name, each in found.items()]
        told = {"load_average_before": load_before, **vars(args)}
        if args.only_routes:
            if (cost := routes_cost(found)) is not None:
                record(
                    Path(__file__).with_name(f"{args.record}.json"),
                    figure="tokens/s that routes take from an engine, as a share of those of one that returns log-probs alone",
                    value=cost,
                    unit="share",
                    goal=None if on_cpu else ROUTES_GOAL,
                    better="lower",
                    details=told,
                    rows=each_row,
                )
            return
        through = rows.get(True, [])
        direct = (directly_alone | rows)[False][: len(through)]
        if not through:
            return
        record(
            Path(__file__).with_name(f"{args.record}.json"),
            figure="output tokens/s through orchestrator's client, router, log-probs and routes, as a share of vLLM's own",
            value=statistics.median(b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(direct, through, strict=True)),
            unit="share",
            goal=None if on_cpu else GOAL,
            better="higher",
            details={
                "directly": direct,
                "through_all": through,
                "tokens_per_s_directly": statistics.median(row["tokens_per_s"] for row in direct),
                "tokens_per_s_through_all": statistics.median(row["tokens_per_s"] for row in through),
                "routes_cost": routes_cost(found),
                "routes_cost_goal": None if on_cpu else ROUTES_GOAL,
                **told,
            },
            rows=each_row,
        )

    # On a CPU both fit, and rounds that alternate see the same neighbours.
    if on_cpu:
        measure(args, (False, True), keep)
    else:
        directly_alone = measure(args, (False,), keep)
        measure(args, (True,), keep)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        sys.argv.remove("--serve")
        serve_dummies()
    else:
        main()
