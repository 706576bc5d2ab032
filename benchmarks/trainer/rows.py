"""Measure the trainer's speed on Qwen3 shapes, optionally beside torchtitan. A row is a shape.

- A row is `orrery bench trainer` of its run without options (`orrery.trainer.bench`).
- Its value is tokens/s a GPU with the router's own choices. Balanced routing is a second variant.
- `--peer` runs torchtitan 0.2.2 first, on the same GPUs and depth. The ratio is a third variant.
- `--layers` makes both models shallower, for small hosts. Then only the ratio has a goal.

    python benchmarks/trainer/rows.py qwen3_30b_a3b_16k            # eight GPUs
    python benchmarks/trainer/rows.py qwen3_30b_a3b_16k --devices 4 --layers 24 --peer
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import torchtitan_peer
from planned import H200_BYTES

from orrery.manifest.budget.parameters import count_parameters
from orrery.manifest.budget.trainer_memory import plan_memory
from orrery.manifest.identity import load
from orrery.trainer.bench import make_request
from orrery.trainer.bench.__main__ import parser as options_parser
from orrery.trainer.bench.__main__ import resolve_options
from record import parser_of, record

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Row:
    """A shape, and its goals on `devices` H200."""

    manifest: str
    goal: float | None
    ratio: float | None = None  # goal of the ratio to torchtitan
    devices: int = 8
    routings: tuple[str, ...] = ("natural", "balanced")
    peer: torchtitan_peer.Job | None = None
    options: tuple[str, ...] = ()  # of `orrery bench trainer`
    plan: float | None = None  # largest error of the planned peak memory
    reduced: str | None = None  # what the row reduces or leaves out


def _moe(seq_len: int, experts: int) -> torchtitan_peer.Job:
    return torchtitan_peer.Job(
        "30B-A3B", seq_len, 1, "full", expert_parallel=experts, balanced=True
    )


def _dense(flavor: str, seq_len: int, batch: int = 1) -> torchtitan_peer.Job:
    return torchtitan_peer.Job(flavor, seq_len, batch, "selective")


RL, ONE = ("--loss", "rl"), ("natural",)
ROWS = {
    "qwen3_30b_a3b_16k": Row("qwen3_30b_a3b_16k", 9000, 1.5, peer=_moe(16384, 1)),
    "qwen3_30b_a3b_16k_rl": Row("qwen3_30b_a3b_16k", 8500, options=RL),
    "qwen3_30b_a3b_16k_offload": Row("qwen3_30b_a3b_16k_offload", 7500),
    "qwen3_30b_a3b_32k": Row("qwen3_30b_a3b_32k", 6500, 1.4, peer=_moe(32768, 8)),
    "qwen3_30b_a3b_64k": Row("qwen3_30b_a3b_64k", 4500, 1.4, peer=_moe(65536, 8)),
    "qwen3_30b_a3b_64k_rl": Row("qwen3_30b_a3b_64k", 4500, options=RL),
    "qwen3_30b_a3b_131k": Row("qwen3_30b_a3b_131k", 2200),
    "qwen3_30b_a3b_lora_16k": Row("qwen3_30b_a3b_lora_16k", 11000),
    "qwen3_30b_a3b_lora_64k": Row("qwen3_30b_a3b_lora_64k", 5500),
    "qwen3_30b_a3b_16k_kitchen_sink": Row("qwen3_30b_a3b_16k_kitchen_sink", None, plan=0.05),
    "qwen3_30b_a3b_16k_cpu_offload": Row(
        "qwen3_30b_a3b_16k", None, options=(*RL, "--fsdp", '{"cpu_offload": true}'), plan=0.05
    ),
    "glm5_slice": Row(
        "glm5_run",
        None,
        options=("--mesh", '{"cp": 4, "dp_shard": 2, "ep": 8}', "--layers", "5"),
        plan=0.1,
        reduced="five layers, products in bf16 instead of FP8",
    ),
    "qwen3_8b_8k": Row("qwen3_8b_8k", 10500, 1.15, routings=ONE, peer=_dense("8B", 8192, 2)),
    "qwen3_4b_16k": Row("qwen3_4b_16k", 13700, 1.15, routings=ONE, peer=_dense("4B", 16384)),
    "qwen3_0_6b_16k": Row(
        "qwen3_0_6b_16k", 52000, 1.15, devices=1, routings=ONE, peer=_dense("0.6B", 16384)
    ),
}


def main() -> None:
    arguments, rest = parser().parse_known_args()  # `orrery bench trainer` gets the rest
    row = ROWS[arguments.row]
    devices = arguments.devices or row.devices
    if arguments.dry_run:
        print_plan(row, devices, arguments.layers, rest)
        return
    folder = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    theirs = None
    if arguments.peer and row.peer is not None:
        try:
            theirs = torchtitan_peer.measure(row.peer, devices, arguments.layers, folder)
        except RuntimeError as error:
            print(error, flush=True)  # our trainer is measured anyway
    found = {}
    for routing in arguments.routing or row.routings:
        options = [*row.options, "--devices", str(devices), "--routing", routing, *rest]
        if arguments.layers is not None:
            options += ["--layers", str(arguments.layers)]
        traces = folder / "traces" / routing if arguments.profile else None
        found[routing] = bench(row.manifest, options, traces)
        # Write after each routing, so that an early end keeps the results.
        write(arguments.row, row, devices, arguments.layers, rest, found, theirs, folder)


def print_plan(row: Row, devices: int, layers: int | None, rest: list[str]) -> None:
    """Print the command and the planned peak of a device. Raise OrreryError if they do not fit."""
    depth = [] if layers is None else ["--layers", str(layers)]
    words = [f"manifests/{row.manifest}.json", *row.options, "--devices", str(devices)]
    words += [*rest, *depth]
    options, _ = resolve_options(row.manifest, options_parser().parse_args(words))
    asked = make_request(load(ROOT / words[0]), options)
    counted = count_parameters(asked.model, asked.trainer.lora)
    plan = plan_memory(asked.model, asked.trainer, asked.load, H200_BYTES, counted)
    print(shlex.join(["orrery", "bench", "trainer", *words]))
    print(
        f"planned peak of a device: {plan.peak_bytes / 2**30:.1f} GiB of {H200_BYTES / 2**30:.1f}"
    )


def bench(manifest: str, options: list[str], traces: Path | None) -> dict[str, Any]:
    """Return the JSON of one measurement. Its table goes to the screen."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "orrery.trainer.bench", f"manifests/{manifest}.json"]
        command += [*options, "--json", str(path)]
        if traces is not None:
            command += ["--profile", str(traces)]
        print("+ " + " ".join(command), flush=True)
        code = subprocess.run(command, cwd=ROOT).returncode
        if code:
            raise SystemExit(code)
        return json.loads(path.read_text())


def write(
    name: str,
    row: Row,
    devices: int,
    layers: int | None,
    extra: list[str],
    found: dict[str, dict[str, Any]],
    theirs: dict[str, Any] | None,
    folder: Path,
) -> None:
    """Write the row's record. Goals are set for the whole model."""
    whole = layers is None
    note = "" if whole else f", {layers} layers"
    rows = [
        {
            "variant": f"{routing} routing on {devices} GPUs{note}",
            "value": one["tokens_per_s_per_device"],
            "unit": "tokens/s/GPU",
            "goal": row.goal if whole else None,
            "expected_step_s": (one["expected_s"] or {}).get("step"),
            "bench": one,
        }
        for routing, one in found.items()
    ]
    for routing, one in found.items():
        if row.plan is not None and (peak := one["peak_allocated_bytes"]):
            error = abs(one["planned_peak_bytes"] / peak - 1)
            variant = f"error of the planned peak, {routing} routing"
            limits = {"unit": "share", "goal": row.plan, "better": "lower"}
            rows.append({"variant": variant, "value": error, **limits})
    if theirs is not None:
        # torchtitan forces balanced routing.
        like = found.get("balanced") or next(iter(found.values()))
        ratio = like["tokens_per_s_per_device"] / theirs["tokens_per_s_per_device"]
        rows.append(
            {
                "variant": f"ratio to torchtitan on {devices} GPUs{note}",
                "value": ratio,
                "unit": "×",
                "goal": row.ratio,
                "peer": theirs,
            }
        )
    details = {
        "row": name,
        "devices": devices,
        "layers": layers,
        "extra_options": extra,
        "goal_is_for_devices": row.devices,
        "reduced": row.reduced,
    }
    record(
        folder / f"{name}.json",
        figure=f"trainer: {name}",
        value=rows[0]["value"],
        unit="tokens/s/GPU",
        goal=rows[0]["goal"],
        better="higher",
        details=details,
        rows=rows,
    )


def parser() -> argparse.ArgumentParser:
    one = parser_of(__doc__, allow_abbrev=False)
    one.add_argument("row", choices=list(ROWS))
    one.add_argument("--devices", "--gpus", type=int)
    one.add_argument("--dry-run", action="store_true", help="print the command and memory plan")
    one.add_argument("--layers", type=int)
    one.add_argument("--routing", action="append", choices=["natural", "balanced"])
    one.add_argument(
        "--peer", action="store_true", help="torchtitan beside it (.whl_titan installed)"
    )
    one.add_argument("--profile", action="store_true", help="keep the traces, in OUT/traces")
    one.add_argument("--out", type=Path, default=HERE)
    return one


if __name__ == "__main__":
    main()
