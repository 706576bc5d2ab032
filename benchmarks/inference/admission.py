"""Compare adaptive admission with fixed limits on a real engine with a small cache.

- A rollout is one request with a random prompt and a log-normal number of tokens. End tokens are
  ignored, so all variants have the same lengths. The orchestrator's `Admission` sets the limits.
- Each variant warms up with `--warm-up` rollouts and is measured over `--rollouts`: tokens/s and
  preemptions a rollout, as the engine counts them.
- `--per cpu` divides by the engine's processor time, for a machine that runs other programs.

    python benchmarks/inference/admission.py --per cpu     # CPU, about 15 minutes
    python benchmarks/inference/admission.py --run qwen3_0_6b_16k --kv-tokens 65536 \\
        --prompt 512 --median 700 --longest 4096 --fixed 16 32 48 64 96 128 192 \\
        --rollouts 1500 --warm-up 500 --record admission_h200     # one GPU
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.identity import canonical_json
from orrery.manifest.schema import AdaptiveAdmission, FixedAdmission, Manifest
from orrery.orchestrator import assemble
from orrery.orchestrator.dispatch import ENGINE_POLL_S, Admission, poll_engines
from orrery.runtime.role_context import RoleContext, parse_role
from record import parser_of, record
from roles import ALONE, ENGINE, roles

ROOT = Path(__file__).parents[2]
GOAL = 0.95
UNITS = {"tokens_per_s": "tokens/s", "tokens_per_engine_cpu_s": "tokens/engine CPU s"}
DEADLINE_S = 1800.0  # a variant takes minutes


def manifest(args: argparse.Namespace) -> Manifest:
    """Return the run `args.run` with one engine and a cache of `--kv-tokens`."""
    content = json.loads((ROOT / "manifests" / f"{args.run}.json").read_text())
    most = max(args.fixed)
    context = -(-(args.prompt + args.longest) // 64) * 64
    content["stages"] |= {"sft": None}
    content["model"]["max_positions"] = max(content["model"]["max_positions"], context)
    content["trainer"]["memory"]["max_tokens_per_micro_batch"] = max(
        context, content["trainer"]["memory"]["max_tokens_per_micro_batch"]
    )
    model, inference = content["model"], content["inference"]
    token_bytes = (
        2
        * model["num_layers"]
        * model["num_kv_heads"]
        * model["head_dim"]
        * (4 if inference["dtype"] == "float32" else 2)
    )
    inference |= {
        **ALONE, "max_num_sequences": 2 * most, "max_model_len_tokens": context,
        "kv_cache_bytes": args.kv_tokens * token_bytes,
    }  # fmt: skip
    content["orchestrator"]["admission"] = {
        "kind": "adaptive",
        "min_in_flight": args.floor,
        "max_in_flight": 2 * most,
    }
    content["orchestrator"]["sampling"]["max_tokens_per_turn"] = args.longest
    return Manifest.model_validate(content)


def computed_s(top: psutil.Process) -> float:
    """Return the processor seconds of the engine's processes so far."""
    return sum(sum(each.cpu_times()[:2]) for each in (top, *top.children(recursive=True)))


class Lengths:
    """Log-normal answer lengths, in the same order for every variant."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.chance = args, random.Random(args.seed)

    def next(self) -> int:
        return max(
            16,
            min(
                self.args.longest,
                int(self.args.median * math.exp(self.args.sigma * self.chance.gauss(0, 1))),
            ),
        )


async def play(
    ctx: RoleContext,
    fleet: Any,
    clock: Callable[[], float],
    admission: Admission,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Run one variant: use all its permits until enough rollouts have ended after the warm-up."""
    lengths, chance, names = Lengths(args), random.Random(args.seed + 1), itertools.count()
    ended, changed = 0, asyncio.Event()
    looks: deque[dict[str, float]] = deque()
    vocabulary = ctx.manifest.model.vocab_size

    async def rollout() -> None:
        nonlocal ended
        prompt = [chance.randrange(10, vocabulary) for _ in range(args.prompt)]
        name = f"{os.getpid()}-{time.monotonic_ns()}-{next(names)}"
        await fleet.generate(
            prompt,
            max_tokens=lengths.next(),
            temperature=1.0,
            cache_salt=name,
            request_id=name,
            ignore_eos=True,
        )
        admission.give_back()
        ended += 1
        changed.set()

    async def watch() -> None:
        while True:
            loads = await poll_engines(ctx, fleet, admission)
            load = loads[0]
            looks.append(
                {"time_s": time.perf_counter(), "limit": admission.limit,
                 "num_in_flight": admission.taken,
                 "kv_usage": load.kv_usage,
                 "running": load.running, "waiting": load.waiting, "ended": ended}
            )  # fmt: skip
            changed.set()
            await asyncio.sleep(ENGINE_POLL_S)

    watching, playing = asyncio.create_task(watch()), set()
    start: tuple[float, float, Any, int] | None = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while start is None or ended < start[3] + args.rollouts:
                if start is None and ended >= args.warm_up:
                    start = time.perf_counter(), clock(), (await fleet.metrics())[0], ended
                while admission.free:
                    admission.take()
                    playing.add(asyncio.create_task(rollout()))
                changed.clear()
                await changed.wait()
                done = {each for each in (*playing, watching) if each.done()}
                for each in done:
                    each.result()
                playing -= done
            stop = time.perf_counter(), clock(), (await fleet.metrics())[0], ended
    finally:
        for each in (watching, *playing):
            each.cancel()
        await asyncio.gather(watching, *playing, return_exceptions=True)
    while (await fleet.metrics())[0].running:
        await asyncio.sleep(0.1)
    tokens = stop[2].generation_tokens_total - start[2].generation_tokens_total
    measured = [each for each in looks if start[0] <= each["time_s"] <= stop[0]]
    limits = sorted(each["limit"] for each in measured)
    return {
        "tokens_per_s": tokens / (stop[0] - start[0]),
        "tokens_per_engine_cpu_s": tokens / (stop[1] - start[1]),
        "preemptions_per_rollout": (stop[2].preemptions_total - start[2].preemptions_total)
        / (stop[3] - start[3]),
        "kv_usage_mean": sum(each["kv_usage"] for each in measured) / len(measured),
        "waiting_mean": sum(each["waiting"] for each in measured) / len(measured),
        "limit_p5_p50_p95": [limits[int(share * (len(limits) - 1))] for share in (0.05, 0.5, 0.95)],
        "num_rollouts": stop[3] - start[3],
        "seconds": stop[0] - start[0],
        "looks": [
            {**each, "time_s": round(each["time_s"] - looks[0]["time_s"], 2)} for each in looks
        ],
    }


async def measure(
    ctx: RoleContext, process: psutil.Process, args: argparse.Namespace
) -> list[dict[str, Any]]:
    context = ctx.manifest.inference.max_model_len_tokens
    bounds = ctx.manifest.orchestrator.admission
    assert isinstance(bounds, AdaptiveAdmission)
    variants: list[tuple[str, AdaptiveAdmission | FixedAdmission]] = [
        *(
            (f"fixed {limit}", FixedAdmission(kind="fixed", max_in_flight=limit))
            for limit in args.fixed
        ),
        ("adaptive", bounds),
    ]
    rows = []
    async with await assemble.engine_pool(ctx) as fleet:
        for number in range(args.rounds):
            for name, settings in (
                variants if number % 2 == 0 else reversed(variants)
            ):  # so that drift of the machine affects all variants
                row = await play(
                    ctx, fleet, lambda: computed_s(process), Admission(settings, context), args
                )
                rows.append(
                    {"variant": name, "round": number, "load_average": os.getloadavg()[0], **row}
                )
                print(
                    f"round {number} {name:10s} {row['tokens_per_s']:7.0f} tokens/s, "
                    f"{row['tokens_per_engine_cpu_s']:5.0f} per CPU s, "
                    f"{row['preemptions_per_rollout']:.2f} preemptions a rollout, cache "
                    f"{row['kv_usage_mean']:.0%}, "
                    f"limit {row['limit_p5_p50_p95']}, {row['seconds']:.0f} s",
                    flush=True,
                )
    return rows


def means(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Return the means of the rounds, by variant."""
    by_variant: dict[str, list[float]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], []).append(row[key])
    return {variant: sum(values) / len(values) for variant, values in by_variant.items()}


def draw(rows: list[dict[str, Any]], key: str, path: Path) -> None:
    """Draw throughput and preemptions by limit, and the adaptive limit over time."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path.name} is not drawn: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    rates, preemptions = means(rows, key), means(rows, "preemptions_per_rollout")
    fixed = [variant for variant in rates if variant.startswith("fixed")]
    at = [int(variant.split()[1]) for variant in fixed]
    for axes, values, label in (
        (left, rates, UNITS[key].replace("/", " / ")),
        (middle, preemptions, "preemptions a rollout"),
    ):  # fmt: skip
        axes.plot(
            at, [values[variant] for variant in fixed], "o-", color="#8a8f98", label="fixed limit"
        )
        axes.axhline(values["adaptive"], color="#1f9d6b", label="adaptive")
        axes.set(xlabel="rollouts in flight", ylabel=label, ylim=(0, 1.1 * max(values.values())))
        axes.legend(frameon=False)
    looks = next(row for row in rows if row["variant"] == "adaptive")["looks"]
    time_s = [each["time_s"] for each in looks]
    right.step(
        time_s, [each["limit"] for each in looks], where="post", color="#1f9d6b", label="limit"
    )
    right.plot(
        time_s,
        [each["num_in_flight"] for each in looks],
        color="#c2701c",
        linewidth=1,
        label="in flight",
    )
    right.set(xlabel="seconds", ylabel="rollouts", ylim=(0, None))
    use = right.twinx()
    use.plot(
        time_s,
        [each["kv_usage"] for each in looks],
        color="#2f6fde",
        linewidth=0.6,
        label="cache in use",
    )
    use.set(ylim=(0, 1.02), ylabel="cache in use")
    right.legend(frameon=False, loc="lower right")
    for axes in (left, middle, right):
        axes.spines[["top"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--run", default="reverse_text", help="which checked-in run's model and machine"
    )
    parser.add_argument("--fixed", type=int, nargs="+", default=[8, 16, 24, 32, 48, 64])
    parser.add_argument(
        "--floor",
        type=int,
        default=4,
        help="of the adaptive limit; its ceiling is twice the largest fixed one",
    )
    parser.add_argument("--kv-tokens", type=int, default=6144)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument(
        "--median", type=float, default=160, help="sampled tokens of a rollout, log-normal"
    )
    parser.add_argument("--sigma", type=float, default=0.6)
    parser.add_argument("--longest", type=int, default=704)
    parser.add_argument("--warm-up", type=int, default=120, help="rollouts")
    parser.add_argument("--rollouts", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per", choices=("wall", "cpu"), default="wall")
    parser.add_argument(
        "--record",
        default="admission",
        help="name of the JSON and of the picture beside this script",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="measure, but do not write the record"
    )
    args = parser.parse_args()

    import torch

    from orrery.models import build, weights
    from orrery.tasks.chat import write_tokenizer

    key = {"wall": "tokens_per_s", "cpu": "tokens_per_engine_cpu_s"}[args.per]
    with tempfile.TemporaryDirectory(prefix="orrery-admission-") as folder:
        run_dir, spec = Path(folder), manifest(args)
        (run_dir / "manifest.json").write_bytes(canonical_json(spec))
        init = run_dir / "weights" / "init"
        init.mkdir(parents=True)
        network = build(spec.model, getattr(torch, spec.inference.dtype), torch.device("cpu"))
        weights.initialize(network, spec.model)
        weights.save(network, spec.model, init)
        write_tokenizer(spec.model, init)
        del network
        ctx = parse_role("orchestrator", ["--run-dir", str(run_dir), "--stage", "rl"])
        try:
            with roles(run_dir, {"inference": ENGINE}) as [started]:
                process = psutil.Process(started.pid)
                rows = asyncio.run(measure(ctx, process, args))
        finally:
            ctx.metrics.close()
    rates = means(rows, key)
    best = max(
        (variant for variant in rates if variant != "adaptive"), key=lambda variant: rates[variant]
    )
    preemptions = means(rows, "preemptions_per_rollout")
    overload = f"fixed {max(args.fixed)}"
    print(
        f"{overload}: {rates[overload] / rates[best]:.3f} of {best}, {preemptions[overload]:.2f} "
        "preemptions a rollout"
    )
    if args.dry_run:
        print(
            f"adaptive: {rates['adaptive'] / rates[best]:.3f} of {best} (goal {GOAL}), "
            f"{preemptions['adaptive']:.2f} preemptions a rollout"
        )
        return
    chosen = {name: value for name, value in vars(args).items() if name != "dry_run"}
    record(
        Path(__file__).with_name(f"{args.record}.json"),
        figure=f"adaptive admission, {key} as a share of the best fixed limit's",
        value=rates["adaptive"] / rates[best],
        unit="share",
        goal=GOAL,
        better="higher",
        details={"best_fixed": best, "preemptions_per_rollout": preemptions, **chosen},
        rows=[
            {
                "value": row[key],
                "unit": UNITS[key],
                "goal": None,
                **{name: value for name, value in row.items() if name != "looks"},
            }
            for row in rows
        ],
    )
    draw(rows, key, Path(__file__).with_name(f"{args.record}.png"))


if __name__ == "__main__":
    main()
