"""Compare the keys that vLLM and the trainer choose in contexts of 131,072 tokens, on one GPU.

The run is `glm5_reverse_text_compare` with long prompts, the published 2,048 keys per query, and
random weights. Engines send four of each token's chosen keys, and the trainer counts those that its
own indexers did not choose. Each RL step has `ROLLOUTS` rollouts. The figure is from steps whose
rollouts have the trainer's weights. Older weights choose other keys.

    bash benchmarks/async/gpu_host.sh figure long_choices.py        # on a GPU host, five minutes
    python benchmarks/async/long_choices.py --runs DIR              # from a finished run in DIR
    python benchmarks/async/long_choices.py --check                 # the manifest only
"""

import sys
from pathlib import Path
from typing import Any

from made_runs import find_or_make_runs, load_run, parser_for_runs
from shapes import checked_in

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import record

NAME = "glm5_long_choices"
CONTEXT, TOP_K, ROLLOUTS, STEPS = 131_072, 2_048, 4, 2
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
METRICS = (
    "choices_missing",
    "mismatch_kl_same_weights",
    "routes_differ",
    "routes_missing",
    "num_tokens",
    "forward_backward_s",
    "peak_bytes",
)
RESERVED = 64  # tokens of a context for the chat's markers, the word and the answer


def long_manifest() -> dict[str, Any]:
    run = checked_in("glm5_reverse_text_compare")
    # Letters of a fixed pseudorandom sequence, so that no part of the prompt repeats.
    state, letters = 1, []
    for _ in range(CONTEXT - RESERVED):
        state = (1103515245 * state + 12345) % 2**31
        letters.append(LETTERS[(state >> 16) % len(LETTERS)])
    for task in [*run["tasks"]["train"], *run["tasks"]["evaluation"]]:
        task["args"]["instruction"] = "".join(letters)
    run["name"] = NAME
    run["model"]["max_positions"] = CONTEXT
    run["model"]["mla"]["indexer"]["top_k"] = TOP_K
    run["inference"] |= {
        "max_model_len_tokens": CONTEXT,
        "max_num_sequences": 16,
        # Compile few of DeepGEMM's kernels, because prompts arrive in chunks of one size.
        "environment": {"VLLM_DEEP_GEMM_WARMUP": "skip"},
    }
    run["trainer"] |= {"indexer": "frozen"}
    run["trainer"]["memory"] |= {
        "activation_checkpointing": {"kind": "full"},
        "max_tokens_per_micro_batch": CONTEXT,
    }
    run["orchestrator"] |= {
        "admission": {"kind": "fixed", "max_in_flight": ROLLOUTS},
        # Random weights solve no problem, so all groups have zero advantages.
        "drop_zero_advantage_groups": False,
        "rollout_timeout_s": 300.0,
        "rollouts_per_batch": ROLLOUTS,
    }
    run["orchestrator"]["algorithm"]["group_size"] = 2
    run["orchestrator"]["evaluation"]["num_problems"] = 1
    run["stages"] = {"sft": None, "rl": {"num_steps": STEPS}, "evaluate": run["stages"]["evaluate"]}
    return run


def main() -> None:
    options = parser_for_runs(__doc__, within_s=420.0).parse_args()
    runs = find_or_make_runs(options, "long_choices", [long_manifest()])
    run = load_run(runs, NAME)
    rows: list[dict[str, Any]] = [
        {"variant": f"step {row['step']}", "value": row.get("choices_differ")}
        | {name: row.get(name) for name in METRICS}
        for row in run.rl
    ]
    print(*rows, sep="\n")
    found = [row["value"] for row in rows if row["mismatch_kl_same_weights"] is not None]
    if len(rows) < STEPS or not found or None in found:
        raise SystemExit("error: a step has no compared keys; read the logs in long_choices_runs")
    record(
        options.out / "long_choices.json",
        figure="a GLM-5 in FP8 at 131,072 tokens: engines' keys that the trainer does not choose",
        value=sum(found) / len(found),
        unit="share",
        goal=None,
        better="lower",
        details={"context": CONTEXT, "top_k": TOP_K, "rollouts": ROLLOUTS, "run": run.run_dir.name},
        rows=rows,
    )


if __name__ == "__main__":
    main()
