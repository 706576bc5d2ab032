"""Measure the share of prompt tokens that KV tiers serve on one GPU, with the routes of a mixture.

The run is `calculator_kv_tiers` on a GPU, with a mixture of experts: two turns, and an engine whose
cache holds few of the rollouts in flight. Before a second turn, a rollout's cache is in host memory
or on disk. The trainer replays all routes, so `routes_missing` must be 0.

    bash benchmarks/async/gpu_host.sh figure kv_tiers.py        # on a GPU host, three minutes
    python benchmarks/async/kv_tiers.py --runs DIR              # from a finished run in DIR
    python benchmarks/async/kv_tiers.py --cpu                   # on a CPU
    python benchmarks/async/kv_tiers.py --check                 # the manifest only
"""

import json
import sys
from pathlib import Path
from typing import Any

from made_runs import find_or_make_runs, load_run, parser_for_runs
from shapes import checked_in

from orrery.observe.report.data import RunData

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import record

NAME, GOAL = "kv_tiers", 0.3
CACHE_BYTES = 1 << 20  # in bfloat16. `calculator_kv_tiers` has twice as many in float32


def manifest_of(is_cpu: bool) -> dict[str, Any]:
    tiers, mixture = checked_in("calculator_kv_tiers"), checked_in("reverse_text_moe")
    run = tiers if is_cpu else checked_in("reverse_text_h200_seed_1")
    run |= {field: tiers[field] for field in ("tasks", "stages", "orchestrator")}
    run |= {"name": NAME, "model": mixture["model"]}
    run["inference"]["kv_offload"] = tiers["inference"]["kv_offload"]
    if not is_cpu:
        run["inference"] |= {"kv_cache_bytes": CACHE_BYTES, "enforce_eager": True}
        run["inference"]["kv_block_tokens"] = 16
        run["trainer"]["compile"] = False
    # Caches of older weights are not reused, so both turns must have the same weights.
    run["orchestrator"] |= {"max_off_policy_steps": 0, "max_batches_ahead": 0}
    run["transport"]["routed_experts"] = True
    return run


def engine_totals(run: RunData) -> tuple[int, int]:
    """Return the engine's prompt tokens, and those of them that tiers served."""
    lines = (run.run_dir / "metrics/orchestrator.0.jsonl").read_text().splitlines()
    rows = [row for line in lines if (row := json.loads(line)).get("event") == "engine"]
    names = "prompt_tokens", "external_hit_tokens"
    prompts, hits = (max((row[name] for row in rows), default=0) for name in names)
    return prompts, hits


def main() -> None:
    parser = parser_for_runs(__doc__, within_s=300.0)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    runs = find_or_make_runs(options, NAME, [manifest_of(options.cpu)])
    run = load_run(runs, NAME)
    prompts, hits = engine_totals(run)
    missing = sum(row.get("routes_missing") or 0 for row in run.rl)
    print(
        f"{len(run.rl)} steps, {prompts} prompt tokens, {hits} from tiers, {missing} routes missing"
    )
    if not run.rl or not prompts:
        raise SystemExit("error: no step, or no prompt; read the logs in kv_tiers_runs")
    if missing:
        raise SystemExit(f"error: {missing} tokens lack a route, so tiers lose routes")
    record(
        options.out / ("kv_tiers_cpu.json" if options.cpu else "kv_tiers.json"),
        figure="prompt tokens served from KV tiers in host memory and on disk, with routes",
        value=hits / prompts,
        unit="share",
        goal=GOAL,
        better="higher",
        details={"steps": len(run.rl), "prompt_tokens": prompts, "run": run.run_dir.name},
    )


if __name__ == "__main__":
    main()
