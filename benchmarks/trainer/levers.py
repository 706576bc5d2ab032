"""Measure the speed and the memory of each memory option: one field of the manifest at a time.

- A row is `orrery bench trainer` in new processes: tokens/s, peak memory beside the planned peak,
  and the share of host copies that overlap with computation (`bench/host_copies.py`).
- The first row is the manifest as it is. A row that fails records its error.
- The record is written after every row. A later call keeps the rows of OUT's record, or of this
  folder's, for the same devices, layers and micro-batches. `--again LEVER` repeats one.

    python benchmarks/trainer/levers.py qwen3_30b_a3b_16k --devices 4 --layers 12 --limit-s 560
    python benchmarks/trainer/levers.py qwen3_8b_8k --devices 4 --check    # plans only, no GPU
    python benchmarks/trainer/levers.py tiny --devices 2 --out OUT         # all rows on a CPU
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.trainer.bench.request import Options, Request, request
from orrery.trainer.memory_plan.plan import plan_memory
from record import record

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
H200_BYTES = 150_109_880_320
BASE = "as the manifest has it"
ROW_S = 90.0  # expected for a row before one was measured
LONGEST_S = 300.0  # after which a row has hung
NORM = 1e-3  # relative difference of gradient norms of the same documents, for bfloat16
GIB = 2**30
RECORDED = (
    "step_s", "peak_allocated_bytes", "peak_reserved_bytes", "planned_peak_bytes", "host_copies"
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    manifest: str
    options: Options
    kinds: tuple[str, ...]  # of options that matter there


MEASURED = {"steps": 3, "warmup": 2, "micro_batches": 2}
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
SHAPES = {
    "qwen3_30b_a3b_16k": Shape(
        "qwen3_30b_a3b_16k",
        Options(loss="sft", routing="balanced", **MEASURED),
        ("all", "mixture"),
    ),
    "qwen3_8b_8k": Shape("qwen3_8b_8k", Options(loss="sft", **MEASURED), ("all",)),
    "tiny": Shape("reverse_text_moe", TINY, ("all", "mixture")),
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
    kind = {"kind": "selective", "keep": list(names)} if names else {"kind": "full"}
    return {"activation_checkpointing": kind}


def lora(*targets: str) -> dict[str, Any]:
    return {"lora": {"rank": 16, "alpha": 32.0, "targets": list(targets), "seed": 1}}


NONE = {"activation_checkpointing": {"kind": "none"}}
KITCHEN_SINK = keep() | {
    "activation_offload": True,
    "optimizer_offload": True,
    "lm_head_keeps_logits": False,
    "lm_head_chunk_tokens": 1024,
}

# (which shapes, name, {section of the request: what is merged over it})
LEVERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("all", "optimizer_offload", {"memory": {"optimizer_offload": True}}),
    ("all", "activation_offload beside full", {"memory": keep() | {"activation_offload": True}}),
    ("all", "activation_offload beside none", {"memory": NONE | {"activation_offload": True}}),
    ("all", "checkpointing none", {"memory": NONE}),
    ("all", "checkpointing full", {"memory": keep()}),
    ("all", "checkpointing keeps attention", {"memory": keep("attention")}),
    ("all", "checkpointing keeps attention, projections",
     {"memory": keep("attention", "projections")}),
    ("mixture", "checkpointing keeps attention, projections, experts",
     {"memory": keep("attention", "projections", "experts")}),
    ("all", "reshard_after_forward true", {"fsdp": {"reshard_after_forward": True}}),
    ("all", "reshard_after_forward false", {"fsdp": {"reshard_after_forward": False}}),
    ("all", "reduce_gradients step", {"fsdp": {"reduce_gradients": "step"}}),
    ("all", "reduce_gradients micro_batch", {"fsdp": {"reduce_gradients": "micro_batch"}}),
    ("all", "lm_head_keeps_logits true", {"memory": {"lm_head_keeps_logits": True}}),
    ("all", "lm_head_keeps_logits false", {"memory": {"lm_head_keeps_logits": False}}),
    ("all", "lm_head_chunk_tokens 1024",
     {"memory": {"lm_head_keeps_logits": False, "lm_head_chunk_tokens": 1024}}),
    ("all", "compile false", {"compile": False}),
    ("all", "lora on attention, rank 16", {"trainer": lora("attention")}),
    ("mixture", "lora on attention and experts, rank 16",
     {"trainer": lora("attention", "experts")}),
    ("mixture", "ep 2", {"mesh": {"ep": 2}}),
    ("mixture", "ep 4", {"mesh": {"ep": 4}}),
    ("all", "cp 2, ulysses", {"mesh": {"cp": 2, "cp_style": "ulysses"}}),
    ("all", "cp 2, ring", {"mesh": {"cp": 2, "cp_style": "ring"}}),
    ("mixture", "ep 2 and cp 2, ring", {"mesh": {"ep": 2, "cp": 2, "cp_style": "ring"}}),
    ("mixture", "activation_offload beside full, ep 2",
     {"memory": keep() | {"activation_offload": True}, "mesh": {"ep": 2}}),
    ("all", "muon", {"trainer": {"optimizer": MUON}}),
    ("all", "muon, optimizer_offload",
     {"trainer": {"optimizer": MUON}, "memory": {"optimizer_offload": True}}),
    ("all", "kitchen sink",
     {"memory": KITCHEN_SINK,
      "fsdp": {"reshard_after_forward": True, "reduce_gradients": "micro_batch"}}),
    ("all", "fsdp.cpu_offload", {"fsdp": {"cpu_offload": True}}),  # last, because it is slowest
)  # fmt: skip


@dataclass(frozen=True)
class Lever:
    name: str
    options: Options
    asked: Request

    @property
    def planned_bytes(self) -> int:
        return plan_memory(
            self.asked.model, self.asked.trainer, self.asked.load, H200_BYTES
        ).peak_bytes


def levers(shape: Shape, devices: int | None, layers: int | None) -> list[Lever]:
    """Return the options to measure, the manifest's own settings first.

    Raise OrreryError if an option does not fit.
    """
    manifest = load(ROOT / "manifests" / f"{shape.manifest}.json")
    start = replace(shape.options, devices=devices, layers=layers)
    found = [Lever(BASE, start, request(manifest, start))]
    for kind, name, changes in LEVERS:
        if kind not in shape.kinds:
            continue
        told = {
            section: change if section == "compile" else json.dumps(change)
            for section, change in changes.items()
        }
        options = replace(start, **told)
        try:
            asked = request(manifest, options)
        except OrreryError:
            if "mesh" in changes:  # too few devices, as for ep 4 on two
                continue
            raise
        if all(asked.trainer != one.asked.trainer for one in found):
            found.append(Lever(name, options, asked))
    return found


def measure(lever: Lever, manifest: str, traces: Path | None, limit_s: float) -> dict[str, Any]:
    """Measure one row. Raise TimeoutError after `limit_s`."""
    row: dict[str, Any] = {
        "variant": lever.name,
        "value": None,
        "unit": "tokens/s/GPU",
        "goal": None,
        "overrides": lever.asked.overrides,
        "planned_peak_bytes": lever.planned_bytes,
    }
    with tempfile.TemporaryDirectory() as folder:
        path, begin_s = Path(folder) / "result.json", time.monotonic()
        command = [sys.executable, "-m", "orrery.trainer.bench", f"manifests/{manifest}.json"]
        command += [*words(lever.options), "--json", str(path)]
        if traces is not None and "offload" in lever.name:
            command += ["--profile", str(traces / lever.name.replace(" ", "_").replace(",", ""))]
        print(f"\n=== {lever.name}", flush=True)
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
            sentence = done.stderr[max(0, done.stderr.find("error: ")) :].strip()
            sentence = sentence.removeprefix("error: ")[-2000:]
            print(sentence, flush=True)
            return row | {"error": sentence}
        bench = json.loads(path.read_text())
    bench["phases"]["longest"] = bench["phases"]["longest"][:8]
    row |= {name: bench[name] for name in RECORDED}
    return row | {"value": bench["tokens_per_s_per_device"], "bench": bench}


def words(options: Options) -> list[str]:
    """Return `options` as a command line."""
    said = []
    for field, value in options.__dict__.items():
        if field == "compile" and value is not None:
            said.append("--compile" if value else "--no-compile")
        elif value is not None:
            said += [f"--{field.replace('_', '-')}", str(value)]
    return said


def rows_before(
    name: str, folders: list[Path], settings: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the rows of the first record, by option, if it has the same settings."""
    for folder in folders:
        path = folder / f"levers_{name}.json"
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
    """Write the record. Every row is compared with the manifest's own settings."""
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
        folder / f"levers_{name}.json",
        figure=f"trainer: levers of {name}",
        value=base["value"],
        unit="tokens/s/GPU",
        goal=None,
        better="higher",
        details=details,
        rows=compared,
    )


def odd_norms(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return an error for each row whose gradient norm differs from an earlier like row's."""
    first: dict[str, tuple[str, float]] = {}
    said = []
    for name, row in rows.items():
        if row["value"] is not None:
            fields = "trainer.lora", "trainer.mesh.cp"
            alike = json.dumps([row["overrides"].get(field) for field in fields])
            norm = row["bench"]["metrics"]["grad_norm"]
            other, expected = first.setdefault(alike, (name, norm))
            if abs(norm / expected - 1) > NORM:
                said.append(
                    f"{name}: its gradients' norm is {norm:.5f}, that of {other!r} "
                    f"{expected:.5f}; one of them is wrong"
                )
    return said


def show(rows: dict[str, dict[str, Any]]) -> None:
    base = rows.get(BASE, {}).get("value")
    head = f"{'lever':58}{'tokens/s':>10}{'':>7}{'peak GiB':>10}{'planned':>9}"
    print(f"\n{head}  copies beside computation")
    for name, row in rows.items():
        if row["value"] is None:
            planned, error = row["planned_peak_bytes"] / GIB, row["error"].splitlines()[-1][:120]
            print(f"{name:58}{'fails':>10}{'':>7}{'':>10}{planned:9.1f}  {error}")
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
        every = levers(shape, arguments.devices, arguments.layers)
    except OrreryError as error:
        raise SystemExit(f"error: {error}") from None
    order = [one.name for one in every]
    if odd := [name for name in arguments.again if name not in order]:
        raise SystemExit(
            f"error: --again {odd[0]!r} is no lever here; choose from {', '.join(order)}"
        )
    if arguments.check:
        for one in every:
            planned, options = one.planned_bytes / GIB, " ".join(words(one.options))
            print(f"{one.name:58}{planned:8.1f} GiB planned  {options}")
        if arguments.record:
            record_plans(arguments.shape, every, arguments.out)
        return
    first = every[0].asked
    settings = {
        "devices": first.num_devices,
        "layers": first.model.num_layers,
        "micro_batches": first.micro_batches,
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
            raise SystemExit(f"error: {arguments.shape} {BASE} fails: {rows[BASE]['error']}")
        # Only of measured rows: a failed one says little about the next.
        longest_s = max(
            (row["wall_s"] for row in rows.values() if row["value"] is not None), default=ROW_S
        )
        write(arguments.shape, settings, rows, order, arguments.out)
    show({name: rows[name] for name in order if name in rows})
    missing = [name for name in order if name not in rows]
    print(
        f"\n{len(missing)} levers are left for the next call: {', '.join(missing)}"
        if missing
        else "\nevery lever is measured"
    )
    if odd := odd_norms({name: rows[name] for name in order if name in rows}):
        raise SystemExit("\n".join(f"error: {one}" for one in odd))


def record_plans(shape: str, every: list[Lever], out: Path) -> None:
    """Record the planned peak of each option."""
    record(
        out / f"levers_{shape}_planned.json",
        figure=f"trainer: peak of a device that is planned for {shape}, and with each lever",
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
        details={"devices": every[0].asked.num_devices, "layers": every[0].asked.model.num_layers},
    )


def parser() -> argparse.ArgumentParser:
    one = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    one.add_argument("shape", choices=list(SHAPES))
    one.add_argument("--devices", type=int, help="instead of the manifest's")
    one.add_argument("--layers", type=int, help="so many of the model's")
    one.add_argument(
        "--limit-s", type=float, default=float("inf"), help="begin no row that would end later"
    )
    one.add_argument(
        "--again", action="append", default=[], metavar="LEVER", help="measure this row anew"
    )
    one.add_argument(
        "--check",
        action="store_true",
        help="measure nothing: say what would be, and the memory that is planned",
    )
    one.add_argument(
        "--record",
        action="store_true",
        help="with --check: write the plans to OUT/levers_SHAPE_planned.json",
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
