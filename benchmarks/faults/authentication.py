"""Measure the cost of authentication: its share of the CPU seconds of two workloads.

- The workloads are the demo, from spec to report, and one round of `orchestrator/overhead`. Their
  CPU seconds include all processes and the start-up. Their output gives the number of checks.
- This process measures the cost of one check: CPU seconds with the check less those without it.
  Measured are a request's credential at the orchestrator, the front (vllm-router's proxy) and the
  engine, a CurveZMQ request for a micro-batch, and a value in the weight wire's store.
- vllm-router asks the front about each key, at the cost of a whole HTTP request.
- The demo's requests go directly to its engine, not through the front.

    python benchmarks/faults/authentication.py      # on a quiet machine, about 4 minutes
"""

import asyncio
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.inference.plugin import GENERATE, RequireToken
from orrery.inference.router import AUTHORIZED, Front
from orrery.manifest.identity import load, run_dir
from orrery.runtime import network as observed
from orrery.runtime.metrics import read
from orrery.runtime.network import Purpose, authorization
from orrery.wire import rollout_wire, sockets
from orrery.wire.columns import Columns
from orrery.wire.rollout_wire import Batch, RolloutReceiver, RolloutSender
from orrery.wire.weight_wire.coordinator import StoreConnection, WireAddress
from record import parser_of, record
from workspace import linked

ROOT = Path(__file__).parents[2]
DEMO = "reverse_text"
TOKEN = "7ab1e5" * 5
GOAL = 0.01
NUM_CALLS, NUM_BATCHES, NUM_QUESTIONS = 20_000, 300, 2000
OVERHEAD = ("--rounds", "1", "--seconds", "15", "--dry-run")
OVERHEAD_S, OVERHEAD_TOKENS = 19.0, 32  # seconds of generation per arm; tokens per request


async def cost_s(
    call: Callable[[], Awaitable[Any]], without: Callable[[], Awaitable[Any]]
) -> float:
    """Return the least of three measurements of CPU seconds: one `call` less one `without`."""

    async def seconds(each: Callable[[], Awaitable[Any]]) -> float:
        begin_s = time.process_time()
        for _ in range(NUM_CALLS):
            await each()
        return (time.process_time() - begin_s) / NUM_CALLS

    return min([max(0.0, await seconds(call) - await seconds(without)) for _ in range(3)])


async def of_requests() -> dict[str, float]:
    """Return the CPU seconds that each process spends to authenticate one generation request."""
    carried = authorization(TOKEN, Purpose.GENERATE)

    async def engine(*_: Any) -> Any: ...

    async def carry() -> dict[str, str]:
        return authorization(TOKEN, Purpose.GENERATE)

    async def nothing() -> None: ...

    scope = {
        "type": "http",
        "path": GENERATE,
        "headers": [(b"host", b"x"), (b"authorization", carried["Authorization"].encode())],
    }
    guarded = RequireToken(engine)
    async with Front(TOKEN, "http://127.0.0.1:1") as front:
        header = carried["Authorization"].encode()

        async def check() -> None:
            front.allows("POST", GENERATE, header)

        url = await front.listen("127.0.0.1", 0) + AUTHORIZED
        async with aiohttp.ClientSession() as session:
            begin_s = time.process_time()
            for _ in range(NUM_QUESTIONS):
                async with session.get(url, headers=carried) as said:
                    said.raise_for_status()
            question_s = (time.process_time() - begin_s) / NUM_QUESTIONS
        return {
            "orchestrator": await cost_s(carry, nothing),
            "front": await cost_s(check, nothing),
            "engine": await cost_s(lambda: guarded(scope, engine, engine), lambda: engine()),
            "vllm-router's question, both ends": question_s,
        }


async def batches_s(is_authenticated: bool) -> float:
    """Return the CPU seconds that both ends of a wire spend on a batch of one small micro-batch."""
    original = sockets.authenticate
    replaced = original if is_authenticated else lambda socket, is_sender: None
    sockets.authenticate = rollout_wire.authenticate = replaced
    columns = Columns(np.array([0, 64]), {"token_id": np.zeros(64, np.int32)})
    try:
        sender = RolloutSender("127.0.0.1", 0, 1)
        receiver = RolloutReceiver(sender.url, 0)
        begin_s = 0.0
        for step in range(NUM_BATCHES + 1):
            await sender.send(Batch(step, [[columns]]))
            await asyncio.to_thread(deque, receiver.receive(step, 60.0), 0)
            begin_s = begin_s or time.process_time()  # the first batch opens the connection
        spent_s = time.process_time() - begin_s
        receiver.close()
        sender.close()
        return spent_s / NUM_BATCHES
    finally:
        sockets.authenticate = rollout_wire.authenticate = original


def of_values() -> float:
    """Return the CPU seconds to sign and check one value of 4 KiB in the weight wire's store."""
    meeting, content = (
        StoreConnection(None, WireAddress("", 0, "", "s" * 64, "nccl", 1, 1)),
        bytes(4096),
    )  # type: ignore[arg-type]
    begin_s = time.process_time()
    for _ in range(NUM_CALLS):
        meeting._mac("holding/0", content)
    return 2 * (time.process_time() - begin_s) / NUM_CALLS


def watched(*command: str, folder: Path) -> tuple[str, float]:
    """Run a command. Return its output and the CPU seconds of its process tree.

    Raise SystemExit if the command fails.
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    return done.stdout, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def demo() -> tuple[Counter[str], float]:
    """Return the checks in the demo, by kind, and the CPU seconds of all its processes."""
    with tempfile.TemporaryDirectory() as name:
        folder, manifest = linked(Path(name)), load(ROOT / "manifests" / f"{DEMO}.json")
        _, cpu_s = watched("snakemake", "--profile", "local", DEMO, folder=folder)
        metrics = run_dir(folder / "runs", manifest) / "metrics"
        said = list(read(metrics / "orchestrator.0.jsonl"))
        steps = [
            row
            for row in read(metrics / "trainer.0.jsonl")
            if row.get("stage") == "rl" and row.get("event") is None
        ]
    updates = [row for row in said if row.get("event") == "update"]
    sampled = sum(row["num_sampled"] for row in said if row.get("event") == "batch")
    evaluated = sum(row["num_rollouts"] for row in said if row.get("event") == "evaluation")
    ranks, engines = manifest.trainer.mesh.world_size, manifest.inference.num_replicas
    micro_batches = sum(row.get("num_micro_batches", 1) for row in steps)
    values = len(updates) * 16 * (ranks + engines)  # an upper bound
    requests = Counter(
        {
            "requests" if manifest.inference.router.kind != "none" else "direct_requests": sampled
            + evaluated
        }
    )
    return requests + Counter(micro_batches=micro_batches * ranks, values=values), cpu_s


def overhead() -> tuple[Counter[str], float]:
    said, cpu_s = watched(
        sys.executable, str(ROOT / "benchmarks/orchestrator/overhead.py"), *OVERHEAD, folder=ROOT
    )
    found = re.search(r"(\d+) tokens/s directly, (\d+) through both", said)
    if found is None:
        raise SystemExit(f"orchestrator/overhead did not say its rates:\n{said[-3000:]}")
    return Counter(requests=round(int(found[2]) * OVERHEAD_S / OVERHEAD_TOKENS)), cpu_s


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--costs", action="store_true", help="print the costs of one check, and end"
    )
    is_costs_alone = parser.parse_args().costs
    observed._token = TOKEN
    request = asyncio.run(of_requests())
    with_s, without_s = asyncio.run(batches_s(True)), asyncio.run(batches_s(False))
    direct_s = request["orchestrator"] + request["engine"]
    costs = {
        "requests": sum(request.values()),
        "direct_requests": direct_s,
        "micro_batches": max(0.0, with_s - without_s),
        "values": of_values(),
    }
    print({"request": request, **costs, "batch": [with_s, without_s]}, flush=True)
    if is_costs_alone:
        return
    rows: list[dict[str, Any]] = []
    for variant, (counts, cpu_s) in (("demo", demo()), ("orchestrator/overhead", overhead())):
        spent_s = {kind: count * costs[kind] for kind, count in counts.items()}
        rows.append(
            {
                "variant": variant,
                "value": sum(spent_s.values()) / cpu_s,
                "cpu_s": cpu_s,
                "counts": counts,
                "spent_s": spent_s,
            }
        )
        print(rows[-1], flush=True)
    record(
        Path(__file__).with_suffix(".json"),
        figure="CPU seconds of authentication's own code, as a share of the run's",
        value=max(row["value"] for row in rows),
        unit="share",
        goal=GOAL,
        better="lower",
        rows=rows,
        details={
            "cost_of_one_s": costs,
            "cost_of_a_request_s": request,
            "batch_s": {"with_curve": with_s, "without": without_s},
        },
    )


if __name__ == "__main__":
    main()
