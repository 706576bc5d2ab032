"""Measure the share of a demo run's CPU seconds that canaries and mismatch bounds take.

- The run is a finished run of the demo. The `usage` rows of all stages give its CPU seconds. Its
  other rows give the number of versions, engines, trainer ranks and compared tokens.
- One canary (prompt that tests the weights) of an engine costs CPU seconds of the engine and of
  this process. They are means over many requests.
- In the trainer, each rank computes one canary and one step's comparison of log-probs. Here one
  rank computes them with the run's weights.

    python benchmarks/faults/canary_cost.py runs/reverse_text-...     # after `make demo`, 30 s
"""

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np

from orrery.manifest.identity import canonical_json
from orrery.manifest.schema import Manifest
from orrery.orchestrator.engines.client import Canary, EngineClient, check_canary
from orrery.runtime.metrics import process_tree, read
from orrery.runtime.role_context import parse_role
from orrery.trainer.assemble import load_policy
from orrery.trainer.learner import Learner, MismatchGuard
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import micro_batch
from orrery.wire import rendezvous
from orrery.wire.columns import Columns
from record import parser_of, record
from roles import ALONE, ENGINE, roles

GOAL = 0.01
TIMES = 200


def spent_s(run_dir: Path) -> float:
    """Return the CPU seconds of all processes of the run, from their first to their last row."""
    total = 0.0
    for path in (run_dir / "metrics").glob("*.jsonl"):
        before: dict[tuple[str, int], float] = {}
        for row in read(path):
            if row.get("event") == "usage":
                key = row["stage"], row["attempt"]
                percent = sum(process["cpu_percent"] for process in row["processes"].values())
                total += percent / 100 * (row["time_s"] - before.get(key, row["time_s"]))
                before[key] = row["time_s"]
    return total


def engine_s(manifest: Manifest, run_dir: Path, weights: Path) -> tuple[float, float]:
    """Return the CPU seconds of one canary: (in the engine's processes, in this process)."""
    content = manifest.model_dump(mode="json")
    content["inference"] |= ALONE
    (run_dir / "manifest.json").write_bytes(canonical_json(Manifest.model_validate(content)))
    (run_dir / "weights").mkdir()
    for name in ("init", "sft"):
        (run_dir / "weights" / name).symlink_to(weights)
    ctx, canary = (
        parse_role("orchestrator", ["--run-dir", str(run_dir), "--stage", "rl"]),
        Canary.of(manifest),
    )
    assert canary is not None

    async def ask(url: str, times: int) -> None:
        async with EngineClient(url) as engine:
            known = await engine.prompt_logprobs(canary.token_ids, "known", 60)
            for number in range(times):
                await check_canary(engine, canary, number, known.tolist())

    def used(pid: int) -> float:
        return sum(each.cpu_s for each in process_tree(pid).values())

    with roles(run_dir, {"inference": ENGINE}) as [process]:
        url = rendezvous.await_endpoints(ctx, "inference", 1, 120.0)[0].url
        asyncio.run(ask(url, 10))  # warm-up
        before, own = used(process.pid), time.process_time()
        asyncio.run(ask(url, TIMES))
        found = (used(process.pid) - before) / TIMES, (time.process_time() - own) / TIMES
    ctx.metrics.close()
    return found


def timed(call: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    call()
    before = time.process_time()
    for _ in range(TIMES):
        call()
    return (time.process_time() - before) / TIMES


def trainer_s(manifest: Manifest, weights: Path, tokens: int) -> tuple[float, float]:
    """Return one rank's CPU seconds: (one canary, the comparison of one step's `tokens`)."""
    mesh = manifest.trainer.mesh.model_copy(
        update={"dp_replicate": 1, "dp_shard": 1, "cp": 1, "ep": 1}
    )
    trainer, world = (
        manifest.trainer.model_copy(update={"mesh": mesh}),
        World(0, 1, torch.device("cpu"), None),
    )
    learner = Learner(
        load_policy(manifest.model, trainer, world, weights),
        world,
        trainer,
        trainer.optimizer,
        trainer.max_grad_norm,
    )
    canary = Canary.of(manifest)
    assert canary is not None
    guard = MismatchGuard(manifest, world, logging.getLogger("trainer.0"))
    token = {
        "token_id": np.ones(tokens, np.int32),
        "trained": np.arange(tokens) > 0,
        "logprob": np.full(tokens, -1.0, np.float32),
        "version": np.zeros(tokens, np.int32),
    }
    batch = micro_batch(
        Columns(np.array([0, tokens]), token, {"engine": np.zeros(1, np.int32)}), 1, world.device
    )
    logprob = torch.full((tokens - 1,), -1.0)

    def step() -> None:
        guard.clear()
        guard.add(batch, logprob)
        guard.check(1, 0.0)

    return timed(lambda: learner.logprobs(canary.token_ids)), timed(step)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run of the demo")
    parser.add_argument(
        "--dry-run", action="store_true", help="measure, but do not write the record"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    manifest = Manifest.model_validate(json.loads((args.run / "manifest.json").read_text()))
    weights = (args.run / "weights" / manifest.stage_before_rl).resolve()
    orchestrator, trainer = (
        [row for row in read(args.run / "metrics" / f"{role}.0.jsonl") if row["stage"] == "rl"]
        for role in ("orchestrator", "trainer")
    )
    updates = [row for row in orchestrator if row.get("event") == "update"]
    steps = [row for row in trainer if row["step"] and "num_trained_tokens" in row]
    ranks = manifest.trainer.mesh.world_size
    tokens = round(sum(row["num_trained_tokens"] for row in steps) / len(steps) / ranks)
    with tempfile.TemporaryDirectory(prefix="orrery-canary-") as folder:
        engine, client = engine_s(manifest, Path(folder), weights)
    canary, comparison = trainer_s(manifest, weights, tokens)
    asked = len(updates) * manifest.inference.num_replicas
    parts = {
        "engines": asked * engine,
        "orchestrator": asked * client,
        "trainer, canaries": (len(steps) + 1) * ranks * canary,
        "trainer, comparisons": len(steps) * ranks * comparison,
    }
    whole_s = spent_s(args.run)
    value = sum(parts.values()) / whole_s
    print(
        "; ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items()),
        f"of {whole_s:.0f} s of the run",
    )
    if args.dry_run:
        print(f"{value:.4f} of the run's CPU seconds (goal {GOAL})")
        return
    record(
        Path(__file__).with_suffix(".json"),
        figure="CPU seconds of canaries and of the bounds on mismatch, as a share of a demo run's",
        value=value,
        unit="share",
        goal=GOAL,
        better="lower",
        details={
            "run": args.run.name,
            "run_cpu_s": whole_s,
            "cpu_s": parts,
            "versions": len(updates),
            "engines": manifest.inference.num_replicas,
            "trainer_ranks": ranks,
            "cpu_s_each": {
                "engine": engine,
                "orchestrator": client,
                "trainer_canary": canary,
                "trainer_comparison": comparison,
            },
            "load_average": os.getloadavg()[0],
        },
    )


if __name__ == "__main__":
    main()
