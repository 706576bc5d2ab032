"""Measure the KL between engine and trainer on one H200, with layers in FP8 and in bfloat16.

The network is Qwen3-4B with random weights, in `asynchrony_h200_1_synchronous`. `KINDS`: sides with
layers in FP8. A row's KL is the mean over steps. All tokens are sampled by the trained weights.

    bash benchmarks/async/gpu_host.sh figure fp8_mismatch.py        # on a GPU host, eight minutes
    python benchmarks/async/fp8_mismatch.py --runs DIR              # from finished runs in DIR
    python benchmarks/async/fp8_mismatch.py --check                 # the manifests only
"""

import sys
from pathlib import Path
from typing import Any

from glm5 import mean_of
from made_runs import find_or_make_runs, parser_for_runs
from shapes import checked_in

from orrery.observe.report.data import RunData

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import record

BOTH, ENGINE, NONE = "FP8 in both", "FP8 in the engine", "bfloat16 in both"
KINDS = {  # quantization of engines, FP8 layers of the model
    BOTH: ("fp8", ["attention", "feed_forward"]),
    ENGINE: ("fp8", None),
    NONE: ("none", None),
}
KL_GOAL, STEPS = 0.005, 3


def name_of(kind: str) -> str:
    return "fp8_mismatch_" + kind.lower().replace(" ", "_")


def manifest_of(kind: str) -> dict[str, Any]:
    run, quantization = checked_in("asynchrony_h200_1_synchronous"), KINDS[kind][0]
    run["name"] = name_of(kind)
    run["model"] = checked_in("asynchrony_h200_2")["model"] | {"fp8": KINDS[kind][1]}
    run["inference"] |= {"quantization": quantization, "enforce_eager": True}
    run["trainer"]["compile"] = False
    run["trainer"]["memory"]["activation_checkpointing"] = {"kind": "full"}
    # Random weights in FP8 on one side only differ by more than the bounds of healthy runs.
    run["trainer"]["mismatch"] |= {"canary_logprob_difference": 8.0, "stop_kl": None}
    run["trainer"]["mismatch"] |= {"stop_logprob_difference": None}
    run["orchestrator"]["rollouts_per_batch"] = 64
    run["orchestrator"]["admission"] = {"kind": "fixed", "max_in_flight": 128}
    for task in [*run["tasks"]["train"], *run["tasks"]["evaluation"]]:
        task["args"] |= {"median_tokens": 100, "max_tokens": 1000}
    run["stages"]["rl"]["num_steps"] = STEPS
    return run


def main() -> None:
    options = parser_for_runs(__doc__, within_s=480.0).parse_args()
    runs = find_or_make_runs(options, "fp8_mismatch", [manifest_of(kind) for kind in KINDS])
    rows = []
    for kind in KINDS:
        found = sorted(runs.glob(f"{name_of(kind)}-????????????"))
        data = RunData.load(found[0]) if found else None
        if data is None or (kl := mean_of(data, "mismatch_kl_same_weights")) is None:
            print(f"left out: {kind} (no step with sampled tokens of the trained weights)")
            continue
        goal = KL_GOAL if kind == BOTH else None
        difference = max(row["logprob_mean_abs_diff"] for row in data.rl)
        rows.append({"variant": kind, "value": kl, "goal": goal, "mean_difference": difference})
        print(rows[-1])
    if not rows or rows[0]["variant"] != BOTH:
        raise SystemExit("error: the run with FP8 in both has no KL; read its logs")
    record(
        options.out / "fp8_mismatch.json",
        figure="Qwen3-4B with random weights: KL between engine and trainer, FP8 in both",
        value=rows[0]["value"],
        unit="nats",
        goal=KL_GOAL,
        better="lower",
        details={"steps": STEPS},
        rows=rows,
    )


if __name__ == "__main__":
    main()
