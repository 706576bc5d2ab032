"""A measurement as JSON, and as a table on the screen.

- A step's time is that of the slowest rank. Tokens a second are the median over measured steps, with the least and the most beside it.
- Utilisation is true operations (`orrery.models.flops`) over what the devices could do at the data sheet's rate in that time. Operations
  that are not counted there, and times expected of them, are null.
"""

import os
import platform
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from orrery.models.flops import hardware_flops, is_counted, model_flops
from orrery.observe.provenance import commit, versions
from orrery.trainer import ALLOCATOR, EXPANDABLE
from orrery.trainer.bench.expected import RATES, Rates, expected
from orrery.trainer.bench.phases import KINDS
from orrery.trainer.bench.request import Request
from orrery.trainer.memory_plan.plan import plan_memory

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


def result(
    request: Request, answers: list[dict[str, Any]], options: dict[str, Any], wall_s: float
) -> dict[str, Any]:
    """Everything that was measured, and what it was measured on."""
    step_s = [max(answer["steps"][n]["step_s"] for answer in answers) for n in range(request.steps)]
    median_s = statistics.median(step_s)
    model, trainer, mesh = request.model, request.trainer, request.trainer.mesh
    groups = answers[:: mesh.cp]  # ranks of one context-parallel group share their documents
    every = [
        [length for group in groups for length in group["steps"][n]["lengths"]]
        for n in range(request.steps)
    ]
    tokens = [
        sum(lengths) for lengths in every
    ]  # a model that pads leaves room in its micro-batches
    speeds = [
        count / request.num_devices / seconds for count, seconds in zip(tokens, step_s, strict=True)
    ]
    rates = RATES.get(answers[0]["device"])
    # The profiled step has documents of its own; with fixed lengths they are the same.
    predicted = expected(request, answers[0]["steps"][-1]["lengths"], answers[0]["device"])
    planned = plan_memory(model, trainer, request.load, answers[0]["device_bytes"])
    return {
        "name": request.name,
        "manifest_id": request.id12,
        "overrides": request.overrides,
        "options": options,
        "devices": request.num_devices,
        "mesh": mesh.model_dump(mode="json"),
        "loss": request.loss,
        "routing": request.routing,
        "lengths": request.lengths,
        "tokens_per_step": round(statistics.mean(tokens)),
        "micro_batches": request.micro_batches,
        "tokens_per_micro_batch": request.tokens_per_micro_batch,
        "document_tokens": request.document_tokens,
        "tokens_per_s_per_device": statistics.median(speeds),
        "tokens_per_s_per_device_least": min(speeds),
        "tokens_per_s_per_device_most": max(speeds),
        "step_s": median_s,
        "steps_s": step_s,
        "warmup_s": [
            max(answer["warmup"][n]["step_s"] for answer in answers) for n in range(request.warmup)
        ],
        "build_s": max(answer["build_s"] for answer in answers),
        "wall_s": wall_s,
        **_work(request, every, request.num_devices * statistics.mean(step_s), rates),
        "peak_flops": None if rates is None else rates.peak_flops,
        "peak_allocated_bytes": max(answer["memory"]["peak_allocated_bytes"] for answer in answers),
        "peak_reserved_bytes": max(answer["memory"]["peak_reserved_bytes"] for answer in answers),
        "allocated_before_steps_bytes": max(
            answer["memory_before_steps"]["allocated_bytes"] for answer in answers
        ),
        "clocks": answers[0]["clocks"],
        "num_allocation_retries": max(
            answer["memory"]["num_allocation_retries"] for answer in answers
        ),
        "expandable_segments": EXPANDABLE in os.environ.get(ALLOCATOR, EXPANDABLE),
        "planned_peak_bytes": planned.peak_bytes,
        "planned_fullest": planned.fullest,
        "num_parameters": answers[0]["num_parameters"],
        "num_trained_parameters": answers[0]["num_trained_parameters"],
        "expected_s": predicted,
        "phases": answers[0]["phases"],
        "host_copies": answers[0]["host_copies"],
        "metrics": answers[0]["steps"][-1]["metrics"],
        "command": shlex.join(
            ["python", "-m", "orrery.trainer.bench", *map(_anywhere, sys.argv[1:])]
        ),
        "hardware": hardware(answers),
        "versions": {**versions(PACKAGES), "cuda": str(torch.version.cuda)},
        "commit": commit(Path(__file__).parent, ":/packages"),
    }


def _work(
    request: Request, every: list[list[int]], device_s: float, rates: Rates | None
) -> dict[str, float | None]:
    """Of steps with documents of `every` lengths, whose mean takes `device_s` of all devices together."""
    model, trainer = request.model, request.trainer
    if not is_counted(model):
        return dict.fromkeys(WORK)
    true = statistics.mean(
        model_flops(model, lengths, trainer.lora is not None).total for lengths in every
    )
    executed = statistics.mean(hardware_flops(model, trainer, lengths).total for lengths in every)
    per_token = true / statistics.mean(sum(lengths) for lengths in every)
    mfu = None if rates is None else true / device_s / rates.peak_flops
    return dict(
        zip(
            WORK,
            (per_token, true / device_s / 1e12, executed / device_s / 1e12, executed / true, mfu),
            strict=True,
        )
    )


def hardware(answers: list[dict[str, Any]]) -> str:
    """The devices that took part, and the host's cores."""
    devices = [answer["device"] for answer in answers]
    cores = f"{len(os.sched_getaffinity(0))} {platform.machine()} cores"
    return ", ".join(
        [
            *(
                f"{devices.count(name)} × {name}"
                for name in dict.fromkeys(devices)
                if name != "cpu"
            ),
            cores,
        ]
    )


def _anywhere(word: str) -> str:
    """A word of the command line as it is on any machine: of a folder its name alone."""
    return Path(word).name if word.startswith("/") else word


def show(result: dict[str, Any]) -> None:
    """The table, on stdout."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    head = f"{result['name']}-{result['manifest_id']}: {result['loss']} loss, {result['routing']} routing, {result['lengths']} lengths"
    console.print(f"[bold]{head}[/bold] on {result['hardware']}", highlight=False)
    for field, (before, after) in result["overrides"].items():
        console.print(f"  not as the manifest says: {field} {after}, not {before}", highlight=False)
    facts = Table(box=None, show_header=False, pad_edge=False)
    gib = 2**30
    spread = f"{result['tokens_per_s_per_device_least']:,.0f} … {result['tokens_per_s_per_device_most']:,.0f}"
    facts.add_row(
        "tokens/s/device",
        f"{result['tokens_per_s_per_device']:,.0f}",
        f"median of {len(result['steps_s'])} steps; {spread}",
    )
    facts.add_row(
        "step",
        f"{result['step_s']:.3f} s",
        f"{result['tokens_per_step']:,} tokens in {result['micro_batches']} micro-batches a rank",
    )
    utilisation = "" if result["mfu"] is None else f"{100 * result['mfu']:.1f} % MFU"
    tflops = "operations of this family are not counted"
    if result["true_tflops_per_device"] is not None:
        tflops = f"{result['true_tflops_per_device']:.3g} true TFLOP/s a device; executed {result['executed_tflops_per_device']:.3g}"
    facts.add_row("work", utilisation, tflops)
    reserved = f"{result['peak_reserved_bytes'] / gib:.1f} GiB reserved, {result['allocated_before_steps_bytes'] / gib:.1f} GiB before steps"
    if result["peak_allocated_bytes"]:  # torch counts on a GPU only
        segments = f"expandable segments {result['expandable_segments']}"
        planned = f"planned {result['planned_peak_bytes'] / gib:.1f} GiB"
        facts.add_row(
            "peak memory",
            f"{result['peak_allocated_bytes'] / gib:.1f} GiB",
            f"{planned}; {reserved}; {segments}",
        )
    if clocks := result["clocks"]:
        power = (
            f"mean of the first device; {clocks['power_w']:.0f} of {clocks['power_limit_w']:.0f} W"
        )
        facts.add_row(
            "clock", f"{clocks['sm_mhz']:,.0f} of {clocks['most_sm_mhz']:,.0f} MHz", power
        )
    for direction, copies in result["host_copies"].items():
        if copies["num_bytes"] >= gib:
            rate = f"{copies['num_bytes'] / 1e9 / copies['seconds']:.0f} GB/s"
            hidden = (
                f"{100 * copies['hidden_s'] / copies['seconds']:.1f} % of it beside computation"
            )
            facts.add_row(
                f"copies {direction}", f"{copies['num_bytes'] / gib:.1f} GiB", f"{rate}, {hidden}"
            )
    console.print(facts)
    phases, predicted = result["phases"], result["expected_s"] or {}
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
        table.add_row(
            name,
            ms(own),
            f"{100 * own / phases['step_s']:.1f} %",
            ms(predicted.get(kind)),
            *columns,
        )
    table.add_row(
        "communication in all",
        ms(phases["communication_total_s"]),
        "",
        ms(predicted.get("communication in all")),
    )
    table.add_row("[bold]step[/bold]", ms(phases["step_s"]), "", ms(predicted.get("step")))
    console.print(table)
