"""Compare our engine's tokens/s, through client, router, log-probs and routes, with plain vLLM's.

- Plain vLLM is `vllm serve` with vLLM's own engine flags and none of our code. Its client counts
  tokens, with and without log-probs of the sampled tokens.
- Our engine serves the same client, and through vllm-router our client
  (`orrery.orchestrator.rollout.run_episode`), which assembles each rollout's expert routes.
- The figure is tokens/s of our client over plain vLLM with log-probs: the median ratio of rounds
  with equal numbers. A mixture returns routes. `--only-routes` measures their cost.
- Weights are dummies. On a GPU the engines run one after the other. On a CPU rounds alternate, and
  engines share cores with the client, so there is no goal.
- A round keeps its number of requests in flight (`steady`). The warm-up includes compilation.

    python benchmarks/inference/throughput.py      # one H200, 512 requests of 512 + 512 tokens
    python benchmarks/inference/throughput.py --only-routes --record routes_cost
    python benchmarks/inference/throughput.py --run reverse_text_moe --tokens 64 \\
        --requests 32 --record throughput_cpu
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.inference.assemble import engine_variables, server_arguments, weights_dir
from orrery.manifest.identity import canonical_json
from orrery.manifest.schema import Manifest
from orrery.models.families import hf_config
from orrery.orchestrator import assemble
from orrery.orchestrator.__main__ import event_loop
from orrery.orchestrator.rollout import open_problem, run_episode
from orrery.runtime.network import free_ports
from orrery.runtime.role_context import RoleContext, parse_role, role_process
from orrery.tasks.task import Judgement, Message, Problem
from orrery.wire import rendezvous
from orrery.wire.routed_experts import route_shape
from record import parser_of, record
from roles import ALONE, ROUTER, roles

ROOT = Path(__file__).parents[2]
GOAL = 0.97
SERVE = (__file__, "--serve")  # an engine with dummy weights
SPARE_TOKENS = 64  # of cache and context beyond what the requests need
ROUTES_GOAL = 0.03  # share of tokens/s that routes cost
OF_OURS = (
    "--weight-transfer-config",
    "--worker-extension-cls",
    "--middleware",
)  # flags that name our code
LOG_PROBS = {"logprobs": 0}  # of the sampled tokens alone
PLAIN, OURS, BARE = "plain vLLM", "our engine", "our engine, no routes"
THROUGH_ALL = "our engine through router and client"
SERVERS: dict[str, dict[str, Sequence[str]]] = {
    PLAIN: {"inference": (__file__, "--serve-plain")},
    OURS: {"inference": SERVE, "router": ROUTER},
    BARE: {"inference": SERVE, "router": ROUTER},
}
# {engine: {variant: sampling parameters that the plain client adds, or None for our client}}
WHOLE: dict[str, dict[str, dict[str, int] | None]] = {
    PLAIN: {f"{PLAIN}, no log-probs": {}, f"{PLAIN}, log-probs": LOG_PROBS},
    OURS: {f"{OURS}, log-probs": LOG_PROBS, THROUGH_ALL: None},
}
ONLY_ROUTES: dict[str, dict[str, dict[str, int] | None]] = {
    BARE: {BARE: LOG_PROBS},
    OURS: {OURS: LOG_PROBS},
}
Rows = dict[str, list[float]]  # tokens/s of each round, by variant


def manifest(args: argparse.Namespace, routes: bool, is_routed: bool = True) -> Manifest:
    """Return the run with one engine for all requests. `is_routed`: whether it has a router."""
    content = json.loads((ROOT / "manifests" / f"{args.run}.json").read_text())
    moe, model = content["model"]["moe"], content["model"]
    cpu = content["hardware"]["accelerator"] == "cpu"
    length = 2 * args.tokens + SPARE_TOKENS
    token_bytes = (
        2 * model["num_layers"] * model["num_kv_heads"] * model["head_dim"] * (4 if cpu else 2)
    )
    content["inference"] |= {
        **ALONE, "max_num_sequences": args.requests, "max_model_len_tokens": length,
        "enforce_eager": cpu,
        "kv_cache_bytes": token_bytes * args.requests * length,
        "max_batched_tokens": 1024 if cpu else 8192,
        "kv_block_tokens": 32,
    }  # fmt: skip
    if is_routed:
        policy = {
            "policy": "round_robin",
            "balance_abs_threshold": None,
            "balance_rel_threshold": None,
        }
        content["inference"]["router"] = {"kind": "vllm_router", **policy}
    content["orchestrator"]["sampling"]["max_tokens_per_turn"] = args.tokens
    content["hardware"]["num_nodes"] = 1  # the trainer is never started
    content["trainer"]["mesh"] |= {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "ep": 1}
    model["max_positions"] = max(model["max_positions"], length)
    content["trainer"]["memory"]["max_tokens_per_micro_batch"] = max(
        length, content["trainer"]["memory"]["max_tokens_per_micro_batch"]
    )
    content["inference"]["quantization"] = args.quantization
    content["transport"]["routed_experts"] = routes and moe is not None
    content["stages"]["sft"] = None
    return Manifest.model_validate(content)


def serve_dummies() -> None:
    """Run this process as an engine with dummy weights. It reads only `config.json`."""
    from orrery.inference import __main__ as role

    arguments = role.server_arguments
    role.server_arguments = lambda *given: [*arguments(*given), "--load-format", "dummy"]
    role.main()


def serve_plain() -> None:
    """Run `vllm serve` with dummy weights here, without our code, OF_OURS flags and plug-ins."""
    with role_process("inference") as ctx:
        host, [port] = ctx.host, free_ports(1, ctx.host)
        words = server_arguments(
            ctx.manifest, weights_dir(ctx.run_dir, ctx.manifest), ctx.index, host, port
        )
        kept, is_dropped = [], False
        for word in words:
            is_dropped = word in OF_OURS if word.startswith("--") else is_dropped
            kept += [] if is_dropped else [word]
        variables = os.environ | engine_variables(ctx.manifest) | {"VLLM_PLUGINS": ""}
        if ctx.manifest.hardware.accelerator == "cpu":
            variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.launchers.api_server.entry",
            *kept,
            "--load-format",
            "dummy",
        ]
        server = subprocess.Popen(command, env=variables)
        try:
            while server.poll() is None and not is_up(f"http://{host}:{port}/health"):
                time.sleep(0.2)
            rendezvous.publish(ctx, f"http://{host}:{port}")
            sys.exit(server.wait())
        finally:
            server.terminate()
            server.wait()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


def prompt(args: argparse.Namespace, vocab_size: int, number: int, index: int) -> np.ndarray:
    """Return i32 [tokens], the request `index` of a round. No two share a prefix."""
    return np.random.default_rng((number, index)).integers(
        0, vocab_size, args.tokens, dtype=np.int32
    )


def prompts(args: argparse.Namespace, vocab_size: int, number: int) -> np.ndarray:
    """Return i32 [requests, tokens]."""
    return np.stack([prompt(args, vocab_size, number, index) for index in range(args.requests)])


Ask = Callable[
    [int, int], Awaitable[int]
]  # (number of the request, tokens to sample) → tokens received


async def steady(args: argparse.Namespace, ask: Ask) -> dict[str, float]:
    """Return the tokens/s of `requests` lanes, each with one request in flight.

    Each lane's first request has another length, so that answers end one by one. The clock starts
    when all have ended, and runs until each lane has one more answer on average.
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
async def asking(
    url: str, salt: int, **more: Any
) -> AsyncIterator[Callable[[np.ndarray, int], Awaitable[int]]]:
    """Yield a plain client's call, which posts a prompt and returns the number of sampled tokens.

    `more` is added to the sampling parameters.
    """
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(prompt: np.ndarray, max_tokens: int) -> int:
            sampling = {
                "max_tokens": max_tokens,
                "temperature": 1.0,
                "detokenize": False,
                "ignore_eos": True,
                **more,
            }
            body = {
                "token_ids": prompt.tolist(),
                "cache_salt": str(salt),
                "sampling_params": sampling,
            }
            async with session.post(
                f"{url}/inference/v1/generate", json=body, timeout=aiohttp.ClientTimeout(None)
            ) as answer:
                answer.raise_for_status()
                return len(json.loads(await answer.read())["choices"][0]["token_ids"])

        yield post


async def all_at_once(
    args: argparse.Namespace, url: str, vocab_size: int, number: int, **more: Any
) -> int:
    """Send all requests at once and return the number of tokens."""
    async with asking(url, number, **more) as post:
        return sum(
            await asyncio.gather(
                *(post(prompt, args.tokens) for prompt in prompts(args, vocab_size, number))
            )
        )


async def directly(
    args: argparse.Namespace, url: str, vocab_size: int, number: int, **more: Any
) -> dict[str, float]:
    async with asking(url, number, **more) as post:
        return await steady(
            args, lambda index, tokens: post(prompt(args, vocab_size, number, index), tokens)
        )


class Prompts:
    """The task and renderer of one round. Problem i has prompt i. Every answer has reward 0."""

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
    """The engine pool, with version 0 for every token, because dummies were never published."""

    def __init__(self, fleet: Any):
        self.fleet = fleet

    async def generate(self, token_ids: np.ndarray, **options: Any) -> Any:
        generation = await self.fleet.generate(token_ids, **(options | {"ignore_eos": True}))
        return replace(generation, versions=np.zeros_like(generation.versions))

    async def abort(self, request_ids: list[str]) -> None:
        await self.fleet.abort(request_ids)


async def through_all(
    args: argparse.Namespace, spec: Manifest, fleet: Any, number: int
) -> dict[str, float]:
    task, shape = (
        Prompts(partial(prompt, args, spec.model.vocab_size, number)),
        route_shape(spec.model),
    )

    async def ask(index: int, tokens: int) -> int:
        opening = await open_problem(task, index, task)
        rollout = await run_episode(
            task=task, opening=opening, max_turns=1, renderer=task, engine=Published(fleet),
            sampling=cast(Any, SimpleNamespace(max_tokens_per_turn=tokens, temperature=1.0)),
            max_model_len_tokens=spec.inference.max_model_len_tokens,
            cache_salt=str(number), name=f"{number}-{index}", timeout_s=3600.0, routes=shape,
        )  # fmt: skip
        if (routes := rollout.routed_experts) is not None and shape is not None:
            assert (routes[:-1] < shape.num_experts).all()
        return int(rollout.trained.sum())

    return await steady(args, ask)


Asked = dict[str, dict[str, dict[str, int] | None]]


async def rounds(
    args: argparse.Namespace,
    asked: Asked,
    stages: dict[str, RoleContext],
    seen: Callable[[Rows], None],
) -> None:
    """Run rounds of these engines' variants in turn. After each, call `seen` with all rows."""
    rows: Rows = {}
    async with AsyncExitStack() as stack:
        fleets = {
            name: await stack.enter_async_context(await assemble.engine_pool(ctx))
            for name, ctx in stages.items()
        }
        for number in range(args.rounds):
            index = 0
            for name, ctx in stages.items():
                for variant, more in asked[name].items():
                    index += 1
                    salt = 1000 * index + number  # so that no prompt repeats
                    if more is None:
                        found = await through_all(args, ctx.manifest, fleets[name], salt)
                    else:
                        found = await directly(
                            args,
                            fleets[name].engines[0].url,
                            ctx.manifest.model.vocab_size,
                            salt,
                            **more,
                        )
                    print(
                        f"{variant}, round {number}: {found['tokens_per_s']:.0f} tokens/s",
                        flush=True,
                    )
                    rows.setdefault(variant, []).append(found["tokens_per_s"])
            seen(rows)


@contextmanager
def stage(spec: Manifest, servers: Mapping[str, Sequence[str]]) -> Iterator[RoleContext]:
    """Make a run directory without weights, and start its `servers` (commands by role)."""
    with tempfile.TemporaryDirectory(prefix="orrery-throughput-") as folder:
        run_dir = Path(folder)
        (run_dir / "manifest.json").write_bytes(canonical_json(spec))
        init = run_dir / "weights" / "init"
        init.mkdir(parents=True)
        config = hf_config(spec.model) | {"eos_token_id": None, "dtype": spec.inference.dtype}
        (init / "config.json").write_text(json.dumps(config))
        ctx = parse_role("orchestrator", ["--run-dir", str(run_dir), "--stage", "rl"])
        try:
            with roles(run_dir, servers):
                yield ctx
        finally:
            ctx.metrics.close()


def measure(
    args: argparse.Namespace, asked: Asked, names: Sequence[str], seen: Callable[[Rows], None]
) -> None:
    with ExitStack() as stack, asyncio.Runner(loop_factory=event_loop) as runner:
        specs = {name: manifest(args, name != BARE, "router" in SERVERS[name]) for name in names}
        stages = {name: stack.enter_context(stage(specs[name], SERVERS[name])) for name in names}
        runner.run(rounds(args, asked, stages, seen))


def ratio(rows: Rows, above: str, below: str) -> float | None:
    """Return the median ratio of rounds with equal numbers, or None without such rounds."""
    pairs = [*zip(rows.get(above, []), rows.get(below, []), strict=False)]
    return statistics.median(a / b for a, b in pairs) if pairs else None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--run", default="qwen3_30b_a3b_16k", help="which checked-in run's model and hardware"
    )
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt, and of an answer")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quantization", choices=("none", "fp8"), default="none", help="of the engine's weights"
    )
    parser.add_argument(
        "--only-routes",
        action="store_true",
        help="measure what routes cost our engine, without client and router",
    )
    parser.add_argument(
        "--record", default="throughput", help="name of the JSON beside this script"
    )
    args = parser.parse_args()
    details = {"load_average_before": os.getloadavg()[0], **vars(args)}
    asked = ONLY_ROUTES if args.only_routes else WHOLE
    on_cpu = manifest(args, False).hardware.accelerator == "cpu"
    rows: Rows = {}

    def keep(found: Rows) -> None:
        """Record after each round, so that an early end loses nothing."""
        rows.update(found)
        variants = [
            {"variant": name, "value": statistics.median(each), "unit": "tokens/s", "rounds": each}
            for name, each in rows.items()
        ]
        path = Path(__file__).with_name(f"{args.record}.json")
        if args.only_routes:
            if (share := ratio(rows, OURS, BARE)) is not None:
                record(
                    path,
                    figure=(
                        "tokens/s that routes take from an engine, as a share of those of one "
                        "that returns log-probs alone"
                    ),
                    value=1 - share,
                    unit="share",
                    goal=None if on_cpu else ROUTES_GOAL,
                    better="lower",
                    details=details,
                    rows=variants,
                )
        elif (share := ratio(rows, THROUGH_ALL, f"{PLAIN}, log-probs")) is not None:
            record(
                path,
                figure=(
                    "output tokens/s through client, router, log-probs and routes, as a share "
                    "of plain vLLM's with log-probs"
                ),
                value=share,
                unit="share",
                goal=None if on_cpu else GOAL,
                better="higher",
                details={
                    **details,
                    "our_engine_to_plain": ratio(rows, f"{OURS}, log-probs", f"{PLAIN}, log-probs"),
                },
                rows=variants,
            )

    # On a CPU all engines fit, and alternating rounds see the same load of other programs.
    for names in [list(asked)] if on_cpu else [[name] for name in asked]:
        measure(args, asked, names, keep)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        sys.argv.remove("--serve")
        serve_dummies()
    elif "--serve-plain" in sys.argv:
        sys.argv.remove("--serve-plain")
        serve_plain()
    else:
        main()
