"""Compare the plan of `manifest/budget` with the trainer's committed measurements.

Prints the error of peak memory and of a step's time for each row in this folder's records, and
writes them to `planned.json`. The value is the share of rows whose time error is at most 10 %.

    python benchmarks/trainer/planned.py
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "async"))
from fp8_layers import SHAPES, options_of
from glm5_rank import FP8
from long_choices import long_manifest

from orrery.manifest.budget.parameters import count_parameters
from orrery.manifest.budget.trainer_memory import plan_memory, stage_workload
from orrery.manifest.budget.trainer_time import Links, step_s
from orrery.manifest.devices import rates_of
from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest
from orrery.trainer.bench import Options, make_request
from record import parser_of, record

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COMPUTED = ("dense products", "grouped products", "attention", "lm head", "elementwise")
H200_BYTES = 150_109_880_320
GIB = 2**30
# Commit 94142abc: the trainer also copies offloaded state beside the passes.
STREAMED_SINCE = "2026-11-27"
# Options that a manifest had when its record was made, but has no longer.
SINCE = {
    "qwen3_8b_8k": {
        "memory": '{"lm_head_keeps_logits": false}',
        "fsdp": '{"reshard_after_forward": true}',
    }
}


def measured() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(HERE.rglob("*.json")):
        found = json.loads(path.read_text())
        for row in found.get("rows", []):
            bench = row.get("bench") or {}
            if bench.get("peak_allocated_bytes"):
                name = f"{path.stem.removeprefix('memory_options_')}: {row['variant']}"
                options = bench["options"] | SINCE.get(bench["name"], {})
                yield name, bench | {"options": options, "measured_at": found["measured_at"]}


def measured_layers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the runs of `fp8_layers.py`, in bfloat16 and FP8."""
    found = json.loads((HERE / "fp8_layers.json").read_text())
    rows = {row["variant"]: row for row in found["rows"]}
    for part, (manifest, layers, fp8, *_) in SHAPES.items():
        options = options_of(part)
        tokens = make_request(load(ROOT / f"manifests/{manifest}.json"), options).load.tokens
        for parts in (None, fp8):
            name = f"{part}: {manifest}, {layers} layers, {'FP8' if parts else 'bfloat16'}"
            yield (
                f"fp8_layers: {name}",
                {
                    "name": manifest,
                    "options": asdict(options),
                    "fp8": parts,
                    "step_s": tokens / rows[name]["value"],
                    "peak_allocated_bytes": rows[name]["peak_gib"] * GIB,
                    "measured_at": found["measured_at"],
                },
            )


def compared(name: str, bench: dict[str, Any]) -> dict[str, Any]:
    options = Options(**bench["options"])
    asked = make_request(load(ROOT / "manifests" / f"{bench['name']}.json"), options)
    model, trainer, work = asked.model, asked.trainer, asked.load
    if bench.get("fp8"):
        model = model.model_copy(update={"fp8": bench["fp8"]})
    counted = count_parameters(model, trainer.lora)
    peak = plan_memory(model, trainer, work, H200_BYTES, counted).peak_bytes
    lengths = [asked.document_tokens] * (work.tokens // asked.document_tokens * work.micro_batches)
    parts = step_s(
        model,
        trainer,
        work.micro_batches,
        lengths,
        rates_of("h200"),
        streams_state=bench["measured_at"] >= STREAMED_SINCE,
    )
    retries = bench.get("num_allocation_retries")  # each stops the device
    row = row_of(name, parts, parts["step"], bench["step_s"])
    return row | memory_of(peak, bench["peak_allocated_bytes"]) | {"allocation_retries": retries}


def row_of(
    name: str, parts: dict[str, float], planned_s: float, measured_s: float
) -> dict[str, Any]:
    return {
        "variant": name,
        "value": planned_s / measured_s - 1,
        "unit": "error of the time",
        "goal": None,
        "planned_s": planned_s,
        "measured_s": measured_s,
        "planned_parts_s": parts,
    }


def memory_of(planned: int, measured: int) -> dict[str, Any]:
    error = planned / measured - 1
    return {"memory_error": error, "planned_bytes": planned, "measured_bytes": measured}


def rank_of_glm5() -> dict[str, Any]:
    """Return the row of `glm5_rank.py`, which measures computation alone, layer by layer."""
    found = json.loads((HERE / "glm5_rank.json").read_text())
    run, details = load(ROOT / "manifests/glm5_run.json"), found["details"]
    mesh = run.trainer.mesh.model_copy(update={"cp": details["cp"], "ep": details["ep"]})
    trainer = run.trainer.model_copy(update={"mesh": mesh})
    model = run.model.model_copy(update={"fp8": FP8})
    alone = Links(*5 * (math.inf,))  # without collectives
    parts = step_s(model, trainer, 1, [details["tokens"]], rates_of("h200"), alone)
    parts = {name: parts[name] for name in COMPUTED}
    [measured_s] = [row["ms"] / 1e3 for row in found["rows"] if row["variant"] == "step"]
    return row_of("glm5_rank: computation of one rank", parts, sum(parts.values()), measured_s)


def long_contexts() -> dict[str, Any]:
    """Return the row of the last step of `async/long_choices.py`, whose first step compiles."""
    found = json.loads((HERE.parent / "async/long_choices.json").read_text())
    manifest = Manifest.model_validate(long_manifest())
    trainer, work = stage_workload(manifest, "rl")
    model, details, step = manifest.model, found["details"], found["rows"][-1]
    counted = count_parameters(model, trainer.lora)
    peak = plan_memory(model, trainer, work, H200_BYTES, counted).peak_bytes
    lengths = details["rollouts"] * [details["context"]]
    parts = step_s(model, trainer, details["rollouts"], lengths, rates_of("h200"))
    name = "long_choices: GLM-5 with 4 layers, documents of 131,072 tokens"
    row = row_of(name, parts, parts["step"], step["forward_backward_s"])
    return row | memory_of(peak, step["peak_bytes"])


def main() -> None:
    one = parser_of(__doc__)
    one.add_argument("--out", type=Path, default=HERE)
    out = one.parse_args().out
    runs = [*measured(), *measured_layers()]
    rows = [*(compared(name, bench) for name, bench in runs), rank_of_glm5(), long_contexts()]
    print(f"{'':72}{'GiB':>7}{'planned':>9}{'s':>8}{'planned':>9}")
    for row in rows:
        memory = " " * 16
        if "memory_error" in row:
            memory = f"{row['measured_bytes'] / GIB:7.1f}{row['memory_error']:+9.1%}"
        print(f"{row['variant'][:71]:72}{memory}{row['measured_s']:8.3f}{row['value']:+9.1%}")
    times = [abs(row["value"]) for row in rows]
    memory_errors = [abs(row["memory_error"]) for row in rows if "memory_error" in row]
    within = sum(error <= 0.1 for error in times) / len(times)
    fitting = sum(error <= 0.05 for error in memory_errors) / len(memory_errors)
    print(f"time within 10 %: {within:.0%}; memory within 5 %: {fitting:.0%} of {len(rows)} rows")
    record(
        out / "planned.json",
        figure="trainer: planned steps whose time is within a tenth of the measured one",
        value=within,
        unit="share",
        goal=1.0,
        better="higher",
        details={
            "rows": len(rows),
            "memory_within_5_percent": fitting,
            "median_time_error": statistics.median(times),
            "largest_time_error": max(times),
            "largest_memory_error": max(memory_errors),
        },
        rows=rows,
    )


if __name__ == "__main__":
    main()
