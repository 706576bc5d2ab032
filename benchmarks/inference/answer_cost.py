"""Measure the CPU time per sampled token for writing answers, with vLLM's code and with ours.

- The network is tiny, so computing a token costs little.
- `theirs` is vLLM's code. `ours` is `patches/vllm_answers.py`.
  Both get the same requests with log-probs. Rounds alternate.
- The figure is the API server's processor time. Other programs lengthen it only a little.

    python benchmarks/inference/answer_cost.py       # on a CPU, a minute
"""

import asyncio
import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import throughput

from record import parser_of, record

HERE = Path(__file__).resolve().parent
THEIRS, OURS = "theirs", "ours"


def serve(way: str) -> None:
    """Run this process as an engine with dummy weights. `way`: THEIRS or OURS."""
    if way == THEIRS:
        from orrery.inference.patches import vllm_answers

        vllm_answers.write_answers = vllm_answers.hold_outputs = lambda: None
    throughput.serve_dummies()


def spent_s(server: psutil.Process) -> dict[str, float]:
    """Return the processor seconds so far of the API server and of its engine core."""
    found = {"api_server": [server], "engine_core": server.children()}
    times = {name: [process.cpu_times() for process in each] for name, each in found.items()}
    return {name: sum(one.user + one.system for one in each) for name, each in times.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--run", default="reverse_text_moe", help="which checked-in run's model")
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt, and of an answer")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4, help="the first is not counted")
    parser.add_argument(
        "--routes", action="store_true", help="of a mixture's tokens, in each answer"
    )
    parser.add_argument(
        "--record", default="answer_cost", help="name of the JSON beside this script"
    )
    parser.set_defaults(quantization="none")
    args = parser.parse_args()
    spec, load_before = throughput.manifest(args, args.routes), psutil.getloadavg()[0]
    rounds: dict[str, list[dict[str, float]]] = {THEIRS: [], OURS: []}
    with ExitStack() as stack:
        servers = {}
        for way in rounds:
            ctx = stack.enter_context(
                throughput.stage(spec, {"inference": (__file__, "--serve", way)})
            )
            servers[way] = ctx.run_dir / "stages" / "rl" / "endpoints" / "inference.0.json"
        for number in range(args.rounds):
            for way, endpoint in servers.items():
                while not endpoint.exists():
                    time.sleep(0.2)
                at = json.loads(endpoint.read_text())
                process = psutil.Process(at["pid"])
                before, begin = spent_s(process), time.perf_counter()
                tokens = asyncio.run(
                    throughput.all_at_once(
                        args, at["url"], spec.model.vocab_size, number, logprobs=0
                    )
                )
                seconds = time.perf_counter() - begin
                if tokens != args.requests * args.tokens:
                    raise SystemExit(
                        f"{tokens} tokens came of {args.requests} requests of {args.tokens}"
                    )
                row = {
                    name: 1e6 * (after - before[name]) / tokens
                    for name, after in spent_s(process).items()
                }
                rounds[way].append(row | {"tokens_per_s": tokens / seconds})
                print(way, rounds[way][-1], flush=True)
    medians = {
        way: {name: statistics.median(row[name] for row in each[1:]) for name in each[0]}
        for way, each in rounds.items()
    }
    record(
        HERE / f"{args.record}.json",
        figure=(
            "processor time of the API server a sampled token, answers with "
            f"log-probs{' and routes' if args.routes else ''}"
        ),
        value=medians[OURS]["api_server"],
        unit="us/token",
        goal=None,
        better="lower",
        details={**vars(args), "load_average_before": load_before, "measured": rounds},
        rows=[
            {"variant": way, "value": each["api_server"], "unit": "us/token", "better": "lower",
             "goal": None,
             "engine_core": each["engine_core"], "tokens_per_s": each["tokens_per_s"]}
            for way, each in medians.items()
        ],
    )  # fmt: skip


if __name__ == "__main__":
    if "--serve" in sys.argv:
        place = sys.argv.index("--serve")
        way = sys.argv[place + 1]
        del sys.argv[place : place + 2]
        serve(way)
    else:
        main()
