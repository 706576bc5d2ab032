"""Measure an engine's tokens/s with a LoRA adapter, as a share of tokens/s without.

- The weights are dummies and the adapter is zeros. Only the shapes matter.
- On a GPU the engines run one after the other. On a CPU both run and rounds alternate. A round is
  all requests at once. The figure is the median ratio of rounds with the same number.

    python benchmarks/inference/adapter_cost.py      # one H200, 512 requests of 512 + 512 tokens
    python benchmarks/inference/adapter_cost.py --run smollm2_smoke --tokens 32 --requests 8 \\
        --record adapter_cost_cpu
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from throughput import SERVE, manifest, prompts, stage

from orrery.manifest.schema import Manifest
from orrery.orchestrator.engines.client import EngineClient
from orrery.runtime.network import run_token
from orrery.wire.rendezvous import await_endpoints
from orrery.wire.weight_wire import served_model
from record import parser_of, record

START_S = 900.0


def adapted(args: argparse.Namespace, adapter: bool) -> Manifest:
    """Return the checked-in run with one engine, with or without an adapter."""
    content = manifest(args, routes=False).model_dump(mode="json")
    content["inference"]["router"] = {"kind": "none"}
    content["transport"]["weights"] = "adapters" if adapter else "files"
    content["trainer"]["lora"] = (
        {"rank": args.rank, "alpha": 2.0 * args.rank, "targets": args.targets, "seed": 1}
        if adapter
        else None
    )
    return Manifest.model_validate(content)


@contextmanager
def engine(args: argparse.Namespace, adapter: bool) -> Iterator[EngineClient]:
    spec = adapted(args, adapter)
    with stage(spec, {"inference": SERVE}) as ctx:
        [endpoint] = await_endpoints(ctx, "inference", 1, START_S)
        yield EngineClient(endpoint.url, run_token(), model=served_model(spec, "rl"))


async def one_round(
    args: argparse.Namespace, client: EngineClient, vocab_size: int, number: int
) -> float:
    """Send all requests at once. Return their tokens/s."""

    async def one(index: int, ids: list[int]) -> int:
        generation = await client.generate(
            ids,
            max_tokens=args.tokens,
            temperature=1.0,
            cache_salt=str(number),
            request_id=f"{number}-{index}",
            ignore_eos=True,
        )
        return len(generation.token_ids)

    begin = time.perf_counter()
    tokens = sum(
        await asyncio.gather(
            *(
                one(index, ids)
                for index, ids in enumerate(prompts(args, vocab_size, number).tolist())
            )
        )
    )
    if tokens != args.requests * args.tokens:
        raise SystemExit(f"{tokens} tokens came of {args.requests} requests of {args.tokens}")
    return tokens / (time.perf_counter() - begin)


async def rounds(
    args: argparse.Namespace, clients: dict[bool, EngineClient]
) -> dict[bool, list[float]]:
    """Run rounds of the engines in turn. Return the tokens/s of all rounds but the first."""
    vocab_size = adapted(args, False).model.vocab_size
    rates: dict[bool, list[float]] = {adapter: [] for adapter in clients}
    for number in range(args.rounds + 1):
        for adapter, client in clients.items():
            rates[adapter].append(await one_round(args, client, vocab_size, number))
            print(
                f"{'with the adapter' if adapter else 'weights alone'}, round {number}: "
                f"{rates[adapter][-1]:.0f} tokens/s",
                flush=True,
            )
    for client in clients.values():
        await client.close()
    return {adapter: each[1:] for adapter, each in rates.items()}


def measure(args: argparse.Namespace, cases: tuple[bool, ...]) -> dict[bool, list[float]]:
    with ExitStack() as stack:
        return asyncio.run(
            rounds(args, {adapter: stack.enter_context(engine(args, adapter)) for adapter in cases})
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--run", default="qwen3_30b_a3b_16k", help="which checked-in run's model and hardware"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", default=["attention"])
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt, and of an answer")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--record", default="adapter_cost", help="name of the JSON beside this script"
    )
    args = parser.parse_args()
    args.quantization = "none"

    load_before = os.getloadavg()[0]
    on_cpu = adapted(args, False).hardware.accelerator == "cpu"
    measured = (
        measure(args, (False, True)) if on_cpu else measure(args, (False,)) | measure(args, (True,))
    )
    record(
        Path(__file__).with_name(f"{args.record}.json"),
        figure=(
            "output tokens/s of an engine that serves an adapter, as a share of one that "
            "serves weights alone"
        ),
        value=statistics.median(
            b / a for a, b in zip(measured[False], measured[True], strict=True)
        ),
        unit="share",
        goal=None,
        better="higher",
        details={
            "tokens_per_s_weights": measured[False],
            "tokens_per_s_adapter": measured[True],
            "load_average_before": load_before,
            **vars(args),
        },
    )


if __name__ == "__main__":
    main()
