"""Return a benchmark's result as JSON. Print it beside expected times.

A step takes as long as its slowest rank. Tokens per second are medians over steps. MFU uses the
data sheet's bf16 rate.
"""

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from orrery.manifest.budget import trainer_time
from orrery.manifest.budget.parameters import hardware_flops, is_counted, model_flops
from orrery.manifest.budget.trainer_memory import plan_memory
from orrery.manifest.devices import DEVICES, Device, accelerator_of, rates_of
from orrery.manifest.identity import commit, versions
from orrery.models.families import count_parameters
from orrery.trainer import ALLOCATOR, EXPANDABLE
from orrery.trainer.bench import BenchRequest
from orrery.trainer.bench.rank import KINDS

PACKAGES = (
    "torch",
    "triton",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "transformers",
    "numpy",
    "pydantic",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
)
WORK = (
    "true_flops_per_token",
    "true_tflops_per_device",
    "executed_tflops_per_device",
    "executed_over_true",
    "mfu",
)
GIB = 2**30


def result(
    request: BenchRequest, answers: list[dict[str, Any]], options: dict[str, Any], wall_s: float
) -> dict[str, Any]:
    model, trainer, mesh = request.model, request.trainer, request.trainer.mesh
    asked = request.options

    def slowest_s(section: str, count: int) -> list[float]:
        return [max(answer[section][n]["step_s"] for answer in answers) for n in range(count)]

    step_s = slowest_s("steps", asked.steps)
    groups = answers[:: mesh.cp]
    every = [
        [length for group in groups for length in group["steps"][n]["lengths"]]
        for n in range(asked.steps)
    ]
    tokens = [sum(lengths) for lengths in every]  # padding is not counted
    speeds = [
        count / request.num_devices / seconds for count, seconds in zip(tokens, step_s, strict=True)
    ]
    first = answers[0]
    accelerator = accelerator_of(first["device"])
    device = None if accelerator is None else DEVICES[accelerator]
    predicted = expected(request, first["steps"][-1]["lengths"], accelerator)
    counted = count_parameters(model, trainer.lora)
    planned = plan_memory(model, trainer, request.load, first["device_bytes"], counted)

    def most(key: str, section: str = "memory") -> int:
        return max(answer[section][key] for answer in answers)

    command = ["python", "-m", "orrery.trainer.bench", *map(_without_folder, sys.argv[1:])]
    return {
        "name": request.name,
        "manifest_id": request.id12,
        "overrides": request.overrides,
        "options": options,
        "devices": request.num_devices,
        "mesh": mesh.model_dump(mode="json"),
        "loss": asked.loss,
        "routing": asked.routing,
        "lengths": asked.lengths,
        "tokens_per_step": round(statistics.mean(tokens)),
        "micro_batches": asked.micro_batches,
        "tokens_per_micro_batch": request.tokens_per_micro_batch,
        "document_tokens": request.document_tokens,
        "tokens_per_s_per_device": statistics.median(speeds),
        "tokens_per_s_per_device_least": min(speeds),
        "tokens_per_s_per_device_most": max(speeds),
        "step_s": statistics.median(step_s),
        "steps_s": step_s,
        "warmup_s": slowest_s("warmup", asked.warmup),
        "build_s": max(answer["build_s"] for answer in answers),
        "wall_s": wall_s,
        **_work(request, every, request.num_devices * statistics.mean(step_s), device),
        "peak_flops": None if device is None else device.bf16_flops,
        "peak_allocated_bytes": most("peak_allocated_bytes"),
        "peak_reserved_bytes": most("peak_reserved_bytes"),
        "allocated_before_steps_bytes": most("allocated_bytes", "memory_before_steps"),
        "clocks": first["clocks"],
        "num_allocation_retries": most("num_allocation_retries"),
        "expandable_segments": EXPANDABLE in os.environ.get(ALLOCATOR, EXPANDABLE),
        "planned_peak_bytes": planned.peak_bytes,
        "planned_fullest": planned.fullest,
        "num_parameters": first["num_parameters"],
        "num_trained_parameters": first["num_trained_parameters"],
        "expected_s": predicted,
        "phases": first["phases"],
        "host_copies": first["host_copies"],
        "metrics": first["steps"][-1]["metrics"],
        "command": shlex.join(command),
        "hardware": _hardware(answers),
        "versions": {**versions(PACKAGES), "cuda": str(torch.version.cuda)},
        "commit": commit(Path(__file__).parent, ":/packages"),
    }


def _work(
    request: BenchRequest, every: list[list[int]], device_s: float, device: Device | None
) -> dict[str, float | None]:
    """Return FLOPs per token, TFLOP/s per device and MFU.

    `every`: document lengths by step. `device_s`: mean seconds per step · number of devices.
    """
    model, trainer = request.model, request.trainer
    if not is_counted(model):
        return dict.fromkeys(WORK)
    has_adapters = trainer.lora is not None
    true = statistics.mean(model_flops(model, lengths, has_adapters).total for lengths in every)
    executed = statistics.mean(hardware_flops(model, trainer, lengths).total for lengths in every)
    per_token = true / statistics.mean(sum(lengths) for lengths in every)
    mfu = None if device is None else true / device_s / device.bf16_flops
    tflops = true / device_s / 1e12, executed / device_s / 1e12
    return dict(zip(WORK, (per_token, *tflops, executed / true, mfu), strict=True))


def _hardware(answers: list[dict[str, Any]]) -> str:
    devices = [answer["device"] for answer in answers]
    names = [name for name in dict.fromkeys(devices) if name != "cpu"]
    cores = f"{len(os.sched_getaffinity(0))} {platform.machine()} cores"
    return ", ".join([*(f"{devices.count(name)} × {name}" for name in names), cores])


def _without_folder(word: str) -> str:
    return Path(word).name if word.startswith("/") else word


def show(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    name = f"{result['name']}-{result['manifest_id']}"
    kind = f"{result['loss']} loss, {result['routing']} routing, {result['lengths']} lengths"
    console.print(f"[bold]{name}: {kind}[/bold] on {result['hardware']}", highlight=False)
    for field, (before, after) in result["overrides"].items():
        console.print(f"  not as the manifest says: {field} {after}, not {before}", highlight=False)
    console.print(_facts(result))
    console.print(_time_by_kind(result["phases"], result["expected_s"] or {}))


def _facts(result: dict[str, Any]) -> Table:
    facts = Table(box=None, show_header=False, pad_edge=False)
    least, most = result["tokens_per_s_per_device_least"], result["tokens_per_s_per_device_most"]
    spread = f"median of {len(result['steps_s'])} steps; {least:,.0f} … {most:,.0f}"
    facts.add_row("tokens/s/device", f"{result['tokens_per_s_per_device']:,.0f}", spread)
    tokens, micro_batches = result["tokens_per_step"], result["micro_batches"]
    text = f"{tokens:,} tokens in {micro_batches} micro-batches a rank"
    facts.add_row("step", f"{result['step_s']:.3f} s", text)
    utilisation = "" if result["mfu"] is None else f"{100 * result['mfu']:.1f} % MFU"
    tflops = "FLOPs of this model family are not counted"
    if (true := result["true_tflops_per_device"]) is not None:
        executed = result["executed_tflops_per_device"]
        tflops = f"{true:.3g} true TFLOP/s a device; executed {executed:.3g}"
    facts.add_row("work", utilisation, tflops)
    if peak := result["peak_allocated_bytes"]:  # zero on a CPU
        planned = f"planned {result['planned_peak_bytes'] / GIB:.1f} GiB"
        before = f"{result['allocated_before_steps_bytes'] / GIB:.1f} GiB before steps"
        reserved = f"{result['peak_reserved_bytes'] / GIB:.1f} GiB reserved, {before}"
        segments = f"expandable segments {result['expandable_segments']}"
        text = f"{planned}; {reserved}; {segments}"
        facts.add_row("peak memory", f"{peak / GIB:.1f} GiB", text)
    if clocks := result["clocks"]:
        watts = f"{clocks['power_w']:.0f} of {clocks['power_limit_w']:.0f} W"
        speed = f"{clocks['sm_mhz']:,.0f} of {clocks['most_sm_mhz']:,.0f} MHz"
        facts.add_row("clock", speed, f"mean of the first device; {watts}")
    for direction, copies in result["host_copies"].items():
        if copies["num_bytes"] >= GIB:
            rate = f"{copies['num_bytes'] / 1e9 / copies['seconds']:.0f} GB/s"
            hidden = 100 * copies["hidden_s"] / copies["seconds"]
            text = f"{rate}, {hidden:.1f} % of it during computation"
            facts.add_row(f"copies {direction}", f"{copies['num_bytes'] / GIB:.1f} GiB", text)
    return facts


def _time_by_kind(phases: dict[str, Any], predicted: dict[str, float]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    passes = [stage for stage in ("forward", "backward", "optimizer") if stage in phases["by_pass"]]
    for column in ("one profiled step", "ms", "share", "expected ms", *passes):
        table.add_column(column, justify="left" if column == "one profiled step" else "right")

    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:,.1f}"

    for kind in KINDS:
        own = phases["by_kind"][kind]
        name = "communication, exposed" if kind == "communication" else kind
        columns = [ms(phases["by_pass"][stage].get(kind)) for stage in passes]
        share = f"{100 * own / phases['step_s']:.1f} %"
        table.add_row(name, ms(own), share, ms(predicted.get(kind)), *columns)
    every = "communication in all"
    table.add_row(every, ms(phases["communication_total_s"]), "", ms(predicted.get(every)))
    table.add_row("[bold]step[/bold]", ms(phases["step_s"]), "", ms(predicted.get("step")))
    return table


def expected(
    request: BenchRequest, lengths: Sequence[int], accelerator: str | None
) -> dict[str, float] | None:
    if accelerator is None or not is_counted(request.model):
        return None
    model, trainer, load = request.model, request.trainer, request.load
    rates = rates_of(accelerator)
    knows_routes = request.options.routing == "balanced"
    return trainer_time.step_s(
        model, trainer, load.micro_batches, lengths, rates, knows_routes=knows_routes
    )
