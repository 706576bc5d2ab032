"""Measure the cost and the freed memory of each memory option, on one shape.

- The first row is the manifest as it is. Each other row changes one option. A row is one run of
  `orrery bench trainer`. A run that fails is a row with its error.
- The record is written after each row. A later call keeps the rows of OUT's record (else of this
  folder's) if devices, layers and micro-batches are equal. Rows fit into `--limit-s` seconds.

    python benchmarks/trainer/memory_options.py qwen3_30b_a3b_16k --devices 4 --limit-s 560
    python benchmarks/trainer/memory_options.py qwen3_8b_8k --check      # plans only; needs no GPU
    python benchmarks/trainer/memory_options.py tiny --devices 2 --out OUT      # on a CPU
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.budget.trainer_memory import plan_memory
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.trainer.bench import BenchRequest, Options, given_options, make_request
from orrery.trainer.bench.__main__ import as_arguments
from record import parser_of, record

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
H200_BYTES = 150_109_880_320
BASE = "as the manifest has it"
ROW_S = 90.0  # estimate for the first row
LONGEST_S = 300.0  # time limit of a row
NORM = 1e-3  # largest relative difference of norms of equal gradients
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    manifest: str
    options: Options
    kinds: tuple[str, ...]  # kinds of CHANGES to apply


MEASURED = Options(loss="sft", steps=3, warmup=2, micro_batches=2)
TINY = Options(
    device="cpu",
    loss="sft",
    routing="balanced",
    steps=1,
    warmup=1,
    micro_batches=2,
    tokens_per_micro_batch=64,
    document_tokens=16,
)
MIXTURE = ("all", "mixture")
SHAPES = {
    "qwen3_30b_a3b_16k": Shape("qwen3_30b_a3b_16k", replace(MEASURED, routing="balanced"), MIXTURE),
    "qwen3_30b_a3b_16k_one_gpu": Shape(
        "qwen3_30b_a3b_16k", replace(MEASURED, routing="balanced", devices=1, layers=5), MIXTURE
    ),
    "qwen3_8b_8k": Shape("qwen3_8b_8k", MEASURED, ("all",)),
    "tiny": Shape("reverse_text_moe", TINY, MIXTURE),
}

ADAMW = {"kind": "adamw", "lr": 1e-6, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
MUON = {
    "kind": "muon",
    "lr": 1e-6,
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.0,
    "num_newton_schulz_steps": 5,
    "rest": ADAMW,
}


def keep(*names: str) -> dict[str, Any]:
    selective = {"kind": "selective", "keep": list(names)}
    return {"activation_checkpointing": selective if names else {"kind": "full"}}


def modules(*names: str) -> dict[str, Any]:
    return {"activation_checkpointing": {"kind": "modules", "modules": list(names)}}


def lora(*targets: str) -> dict[str, Any]:
    return {"lora": {"rank": 16, "alpha": 32.0, "targets": list(targets), "seed": 1}}


NONE = {"activation_checkpointing": {"kind": "none"}}
KITCHEN_SINK = keep() | {
    "activation_offload": True,
    "optimizer_offload": True,
    "lm_head_keeps_logits": False,
    "lm_head_chunk_tokens": 1024,
}

OFFLOADED = keep() | {"activation_offload": True}


def in_flight(count: int) -> dict[str, Any]:
    return {"memory": OFFLOADED | {"activation_offload_max_in_flight": count}}


CHUNKED = {"lm_head_keeps_logits": False, "lm_head_chunk_tokens": 1024}
LEAST = {"reshard_after_forward": True, "reduce_gradients": "micro_batch"}
ALL_KEPT = ("attention", "projections", "experts")
ALL_MODULES = ("norms", "attention_projections", "router", "experts_activation")
# (kinds of shapes, name, {option of the bench: its value, merged as JSON})
CHANGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("all", "checkpointing none", {"memory": NONE}),
    ("all", "checkpointing full", {"memory": keep()}),
    ("all", "checkpointing keeps attention", {"memory": keep("attention")}),
    (
        "all",
        "checkpointing keeps attention, projections",
        {"memory": keep("attention", "projections")},
    ),
    ("mixture", "checkpointing keeps attention, projections, experts", {"memory": keep(*ALL_KEPT)}),
    ("all", "checkpointing of norms", {"memory": modules("norms")}),
    (
        "all",
        "checkpointing of norms, projections",
        {"memory": modules("norms", "attention_projections")},
    ),
    ("mixture", "checkpointing of expert activations", {"memory": modules("experts_activation")}),
    ("mixture", "checkpointing of all modules", {"memory": modules(*ALL_MODULES)}),
    ("all", "optimizer_offload", {"memory": {"optimizer_offload": True}}),
    ("all", "activation_offload beside full", {"memory": OFFLOADED}),
    ("all", "activation_offload beside none", {"memory": NONE | {"activation_offload": True}}),
    *(
        ("all", f"activation_offload beside full, {count} blocks in flight", in_flight(count))
        for count in (2, 4)
    ),
    ("all", "reshard_after_forward true", {"fsdp": {"reshard_after_forward": True}}),
    ("all", "reshard_after_forward false", {"fsdp": {"reshard_after_forward": False}}),
    ("all", "reduce_gradients step", {"fsdp": {"reduce_gradients": "step"}}),
    ("all", "reduce_gradients micro_batch", {"fsdp": {"reduce_gradients": "micro_batch"}}),
    ("all", "lm_head_keeps_logits true", {"memory": {"lm_head_keeps_logits": True}}),
    ("all", "lm_head_keeps_logits false", {"memory": {"lm_head_keeps_logits": False}}),
    ("all", "lm_head_chunk_tokens 1024", {"memory": CHUNKED}),
    ("all", "compile false", {"compile": False}),
    ("all", "lora on attention, rank 16", {"trainer": lora("attention")}),
    (
        "mixture",
        "lora on attention and experts, rank 16",
        {"trainer": lora("attention", "experts")},
    ),
    ("mixture", "ep 2", {"mesh": {"ep": 2}}),
    ("mixture", "ep 4", {"mesh": {"ep": 4}}),
    ("all", "cp 2, ulysses", {"mesh": {"cp": 2, "cp_style": "ulysses"}}),
    ("all", "cp 2, ring", {"mesh": {"cp": 2, "cp_style": "ring"}}),
    ("mixture", "ep 2 and cp 2, ring", {"mesh": {"ep": 2, "cp": 2, "cp_style": "ring"}}),
    ("mixture", "activation_offload beside full, ep 2", {"memory": OFFLOADED, "mesh": {"ep": 2}}),
    ("all", "muon", {"trainer": {"optimizer": MUON}}),
    (
        "all",
        "muon, optimizer_offload",
        {"trainer": {"optimizer": MUON}, "memory": {"optimizer_offload": True}},
    ),
    ("all", "kitchen sink", {"memory": KITCHEN_SINK, "fsdp": LEAST}),
    # Last, because it is the slowest.
    ("all", "fsdp.cpu_offload", {"fsdp": {"cpu_offload": True}}),
)


@dataclass(frozen=True)
class Variant:
    """The manifest with one option changed."""

    name: str
    options: Options
    request: BenchRequest

    @property
    def planned_bytes(self) -> int:
        one = self.request
        return plan_memory(one.model, one.trainer, one.load, H200_BYTES).peak_bytes


def variants(shape: Shape, devices: int | None, layers: int | None) -> list[Variant]:
    """Return the variants to measure, the unchanged manifest first.

    Raise OrreryError if an option does not fit the manifest.
    """
    manifest = load(ROOT / "manifests" / f"{shape.manifest}.json")
    start = replace(
        shape.options,
        devices=devices or shape.options.devices,
        layers=layers or shape.options.layers,
    )
    found = [Variant(BASE, start, make_request(manifest, start))]
    for kind, name, changes in CHANGES:
        if kind not in shape.kinds:
            continue
        given: dict[str, Any] = {
            section: change if section == "compile" else json.dumps(change)
            for section, change in changes.items()
        }
        options = replace(start, **given)
        try:
            request = make_request(manifest, options)
        except OrreryError:
            if "mesh" in changes:  # impossible here, such as ep 4 on two devices
                continue
            raise
        if all(request.trainer != one.request.trainer for one in found):
            found.append(Variant(name, options, request))
    return found


def measure(variant: Variant, manifest: str, traces: Path | None, limit_s: float) -> dict[str, Any]:
    """Return the variant's row. Raise TimeoutError if it takes more than `limit_s`."""
    row: dict[str, Any] = {"variant": variant.name, "value": None}
    row |= {"unit": "tokens/s/GPU", "goal": None, "overrides": variant.request.overrides}
    row["planned_peak_bytes"] = variant.planned_bytes
    with tempfile.TemporaryDirectory() as folder:
        path, begin_s = Path(folder) / "result.json", time.monotonic()
        command = [sys.executable, "-m", "orrery.trainer.bench", f"manifests/{manifest}.json"]
        command += [*words(variant.options), "--json", str(path)]
        if traces is not None and "offload" in variant.name:
            command += ["--profile", str(traces / variant.name.replace(" ", "_").replace(",", ""))]
        print(f"\n=== {variant.name}", flush=True)
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=min(limit_s, LONGEST_S)
            )
        except subprocess.TimeoutExpired:
            if limit_s < LONGEST_S:
                raise TimeoutError from None
            return row | {"error": f"not done after {LONGEST_S:g} s", "wall_s": LONGEST_S}
        row["wall_s"] = time.monotonic() - begin_s
        print(done.stdout, flush=True)
        if done.returncode:
            error = done.stderr[max(0, done.stderr.find("error: ")) :].strip()
            error = error.removeprefix("error: ")[-2000:]
            print(error, flush=True)
            return row | {"error": error}
        bench = json.loads(path.read_text())
    bench["phases"]["longest"] = bench["phases"]["longest"][:8]
    memory = ("peak_allocated_bytes", "peak_reserved_bytes", "planned_peak_bytes")
    row |= {name: bench[name] for name in ("step_s", *memory, "host_copies")}
    return row | {"value": bench["tokens_per_s_per_device"], "bench": bench}


def words(options: Options) -> list[str]:
    return shlex.split(as_arguments(given_options(options)))


def rows_before(
    name: str, folders: list[Path], settings: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the rows of the first record with these settings, by variant."""
    for folder in folders:
        path = folder / f"memory_options_{name}.json"
        if path.exists():
            content = json.loads(path.read_text())
            if content["details"]["settings"] == settings:
                return {row["variant"]: row for row in content["rows"]}
    return {}


def write(
    name: str,
    settings: dict[str, Any],
    rows: dict[str, dict[str, Any]],
    order: list[str],
    folder: Path,
) -> None:
    """Write the record. Its value is the unchanged manifest's. All rows are compared with it."""
    base = rows[BASE]
    compared = []
    for one in sorted(rows.values(), key=lambda row: order.index(row["variant"])):
        more = {}
        if one["value"] is not None:
            more = {
                "speed_ratio": one["value"] / base["value"],
                "freed_bytes": base["peak_allocated_bytes"] - one["peak_allocated_bytes"],
                "planned_to_free_bytes": base["planned_peak_bytes"] - one["planned_peak_bytes"],
            }
        compared.append(one | more)
    details = {
        "shape": name,
        "settings": settings,
        "not_measured": [one for one in order if one not in rows],
    }
    record(
        folder / f"memory_options_{name}.json",
        figure=f"trainer: memory options of {name}",
        value=base["value"],
        unit="tokens/s/GPU",
        goal=None,
        better="higher",
        details=details,
        rows=compared,
    )


def odd_norms(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return an error for each gradient norm that differs from the first of equal LoRA and cp."""
    first: dict[str, tuple[str, float]] = {}
    said = []
    for name, row in rows.items():
        if row["value"] is not None:
            alike = json.dumps(
                [row["overrides"].get(field) for field in ("trainer.lora", "trainer.mesh.cp")]
            )
            norm = row["bench"]["metrics"]["grad_norm"]
            other, expected = first.setdefault(alike, (name, norm))
            if abs(norm / expected - 1) > NORM:
                said.append(
                    f"{name}: its gradients' norm is {norm:.5f}, "
                    f"that of {other!r} {expected:.5f}; one of them is wrong"
                )
    return said


def show(rows: dict[str, dict[str, Any]]) -> None:
    base = rows.get(BASE, {}).get("value")
    head = f"{'memory option':58}{'tokens/s':>10}{'':>7}{'peak GiB':>10}{'planned':>9}"
    print(f"\n{head}  copies beside computation")
    for name, row in rows.items():
        if row["value"] is None:
            error = row["error"].splitlines()[-1][:120]
            planned = f"{row['planned_peak_bytes'] / GIB:9.1f}"
            print(f"{name:58}{'fails':>10}{'':>17}{planned}  {error}")
            continue
        large = {way: one for way, one in row["host_copies"].items() if one["num_bytes"] >= GIB}
        hidden = ", ".join(
            f"{way} {100 * one['hidden_s'] / one['seconds']:.0f} %" for way, one in large.items()
        )
        memory = f"{row['peak_allocated_bytes'] / GIB:10.1f}{row['planned_peak_bytes'] / GIB:9.1f}"
        print(f"{name:58}{row['value']:10,.0f}{row['value'] / base:7.2f}{memory}  {hidden}")


def main() -> None:
    begin_s = time.monotonic()
    arguments = parser().parse_args()
    shape = SHAPES[arguments.shape]
    try:
        every = variants(shape, arguments.devices, arguments.layers)
    except OrreryError as error:
        raise SystemExit(f"error: {error}") from None
    order = [one.name for one in every]
    if odd := [name for name in arguments.again if name not in order]:
        raise SystemExit(
            f"error: --again {odd[0]!r} is no memory option here; choose from {', '.join(order)}"
        )
    if arguments.check:
        for one in every:
            planned = f"{one.planned_bytes / GIB:8.1f} GiB planned"
            print(f"{one.name:58}{planned}  {' '.join(words(one.options))}")
        if arguments.record:
            record_plans(arguments.shape, every, arguments.out)
        return
    first = every[0].request
    settings = {
        "devices": first.num_devices,
        "layers": first.model.num_layers,
        "micro_batches": first.options.micro_batches,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = rows_before(arguments.shape, [arguments.out, HERE], settings)
    rows = {
        name: row for name, row in rows.items() if name in order and name not in arguments.again
    }
    longest_s = max((row["wall_s"] for row in rows.values()), default=ROW_S)
    for one in every:
        if one.name in rows:
            continue
        left_s = arguments.limit_s - (time.monotonic() - begin_s)
        if left_s < 1.1 * longest_s:
            break
        try:
            rows[one.name] = measure(one, shape.manifest, arguments.traces, left_s)
        except TimeoutError:
            break
        if one.name == BASE and rows[BASE]["value"] is None:
            raise SystemExit(
                f"error: {arguments.shape} {BASE} fails, so no option can be compared with it: "
                f"{rows[BASE]['error']}"
            )
        # Rows that fail early do not predict the next row's time.
        longest_s = max(
            (row["wall_s"] for row in rows.values() if row["value"] is not None), default=ROW_S
        )
        write(arguments.shape, settings, rows, order, arguments.out)
    show({name: rows[name] for name in order if name in rows})
    missing = [name for name in order if name not in rows]
    left = f"{len(missing)} memory options are left for the next call: {', '.join(missing)}"
    print(f"\n{left}" if missing else "\nevery memory option is measured")
    if odd := odd_norms({name: rows[name] for name in order if name in rows}):
        raise SystemExit("\n".join(f"error: {one}" for one in odd))


def record_plans(shape: str, every: list[Variant], out: Path) -> None:
    """Record the planned peak of each variant, without measuring."""
    record(
        out / f"memory_options_{shape}_planned.json",
        figure=f"trainer: planned peak of a device for {shape}, by memory option",
        value=every[0].planned_bytes / GIB,
        unit="GiB",
        goal=None,
        better="lower",
        rows=[
            {
                "variant": one.name,
                "value": one.planned_bytes / GIB,
                "unit": "GiB",
                "better": "lower",
                "goal": None,
            }
            for one in every
        ],
        details={
            "devices": every[0].request.num_devices,
            "layers": every[0].request.model.num_layers,
        },
    )


def parser() -> argparse.ArgumentParser:
    one = parser_of(__doc__, allow_abbrev=False)
    one.add_argument("shape", choices=list(SHAPES))
    one.add_argument("--devices", type=int, help="instead of the manifest's")
    one.add_argument("--layers", type=int, help="number of layers, instead of the model's")
    one.add_argument(
        "--limit-s", type=float, default=float("inf"), help="start no row that would end later"
    )
    one.add_argument(
        "--again", action="append", default=[], metavar="OPTION", help="measure this row again"
    )
    one.add_argument(
        "--check",
        action="store_true",
        help="only print the rows and their planned memory",
    )
    one.add_argument(
        "--record",
        action="store_true",
        help="with --check: write the plans to OUT/memory_options_SHAPE_planned.json",
    )
    one.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="keep the traces of the rows whose names say offload",
    )
    one.add_argument("--out", type=Path, default=HERE)
    return one


if __name__ == "__main__":
    main()
