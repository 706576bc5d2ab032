"""Compare the planned speed of an engine (`manifest/budget/engine.py`) with committed records.

Print the relative error of the planned output tokens/s for each record of one engine on an H200.
Write the errors to `planned.json`, whose `value` is the largest absolute error. The constants of
`engine.py` are fitted to records in this folder.

    python benchmarks/inference/planned.py
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.budget import engine
from orrery.manifest.budget.engine import Serving
from orrery.manifest.devices import rates_of
from orrery.manifest.identity import load
from orrery.manifest.schema.inference import token_bytes
from record import parser_of, record

HERE = Path(__file__).resolve().parent
ALONE = {"tensor_parallel": 1, "data_parallel": 1, "expert_parallel": False}


def measured() -> Iterator[tuple[str, str, Serving, int, float]]:
    """Yield (record, run, load, KV cache size in tokens, measured output tokens/s)."""
    for name in ("throughput", "adapter_cost_qwen3_4b", "routes_cost"):
        found = json.loads((HERE / f"{name}.json").read_text())
        about = found["details"]
        tokens, requests = about["tokens"], about["requests"]
        if name == "throughput":
            (row,) = [one for one in found["rows"] if one["variant"].startswith("our engine throu")]
            speed = row["value"]
        elif name == "routes_cost":
            speed = found["rows"][0]["value"]
        else:
            speed = sum(about["tokens_per_s_weights"]) / len(about["tokens_per_s_weights"])
        yield name, about["run"], Serving(tokens, tokens, requests), 2 * tokens * requests, speed
    found = json.loads((HERE / "admission_h200.json").read_text())
    about = found["details"]
    rows = [row for row in found["rows"] if row["variant"] == "adaptive"]
    speed = sum(row["value"] for row in rows) / len(rows)
    in_flight = sum(row["limit_p5_p50_p95"][1] for row in rows) / len(rows)
    load_of = Serving(about["prompt"], about["median"], in_flight)
    yield "admission_h200", about["run"], load_of, about["kv_tokens"], speed


def compared(name: str, run: str, load_of: Serving, cached: int, speed: float) -> dict[str, Any]:
    manifest, rates = load(HERE.parents[1] / "manifests" / f"{run}.json"), rates_of("h200")
    model = manifest.model
    inference = manifest.inference.model_copy(update=ALONE | {"max_num_sequences": 512})
    cache = cached * token_bytes(model, inference)
    inference = inference.model_copy(update={"kv_cache_bytes": cache})
    batch = engine.batch_size(model, inference, load_of)
    step_s = engine.decode_s(model, inference, batch, load_of.mean_context, rates, 0.0)
    prefill_s = engine.prefill_s(model, inference, load_of.prompt, rates, 0.0)
    planned = load_of.sampled / (load_of.sampled * step_s / batch + prefill_s)
    return {
        "variant": f"{name}: {run}",
        "value": planned / speed - 1,
        "unit": "error of output tokens/s",
        "goal": None,
        "planned_tokens_per_s": planned,
        "measured_tokens_per_s": speed,
    }


def main() -> None:
    parser_of(__doc__).parse_args()
    rows = [compared(*one) for one in measured()]
    for row in rows:
        print(f"{row['variant']:50}{row['measured_tokens_per_s']:9,.0f}{row['value']:+8.1%}")
    record(
        HERE / "planned.json",
        figure="inference: largest error of the planned output tokens/s of one engine",
        value=max(abs(row["value"]) for row in rows),
        unit="share",
        goal=0.1,
        better="lower",
        details={"rows": len(rows)},
        rows=rows,
    )


if __name__ == "__main__":
    main()
