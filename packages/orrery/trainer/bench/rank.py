"""Time training steps on one rank: `python -m orrery.trainer.bench.rank FOLDER`.

Write the results or an error to `FOLDER/rank.<n>.json`.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from orrery.manifest.errors import OrreryError
from orrery.models import lora, weights
from orrery.models.placement import local_tensor
from orrery.runtime.process_control import die_with_parent
from orrery.trainer.bench import BenchRequest, micro_batches
from orrery.trainer.learner import Learner, count_totals
from orrery.trainer.out_of_memory import describe_error, device_bytes, is_out_of_memory
from orrery.trainer.parallel import build_policy
from orrery.trainer.parallel.world import World, destroy_world, device_for, init_world

STEP = "orrery.step"
STD = 0.02
MEMORY_FIELDS = {
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
    "allocated_bytes": "allocated_bytes.all.current",
    "num_allocation_retries": "num_alloc_retries",
}
CLOCK_FIELDS = {
    "sm_mhz": "clocks.sm",
    "power_w": "power.draw",
    "most_sm_mhz": "clocks.max.sm",
    "power_limit_w": "power.limit",
}
CLOCK_INTERVAL_MS = 50

IDLE = "idle"
COMMUNICATION = "communication"
COPIES = "copies"
_PRODUCTS = r"gemm|Gemm|GEMM|nvjet|cublas|cutlass|splitK|^triton_tem|aten::(add|b)?mm_?$"
# (kind, regex of kernel name, regex of a surrounding profiler range). First match wins.
_RULES = (
    (COMMUNICATION, r"nccl|gloo|c10d::|symm_mem|deep_ep", None),
    ("sharding copies", None, r"FSDP::"),  # first, because FSDP's copies also match "optimizer"
    ("optimizer", r"multi_tensor_apply|[Aa]dam", None),
    ("optimizer", None, r"Optimizer\.step|optimizer\.step"),
    ("lm head", None, r"TokenLogprob"),
    ("elementwise", r"^triton_(poi|red|per|fused)_", None),
    ("attention", r"flash|fmha|sdpa|[Aa]ttention", None),
    ("attention", None, r"varlen_attention|scaled_dot_product|flash_attention|_attn"),
    ("attention", None, r"orrery::(sparse_mla|chosen_|select_|engine_keys|quantize_index)"),
    ("grouped products", r"GroupProblemShape|[Gg]rouped", None),
    ("grouped products", r"gemm|mm|nvjet|cutlass|wgmma", r"grouped_m|fp8_grouped"),
    ("expert rows", r"spread_rows|sum_rows|swiglu_rows|expert_rows|sort|Sort|histogram", None),
    ("dense products", _PRODUCTS, None),
    ("sharding copies", r"split_with_sizes|chunk_cat", None),
)
KINDS = (
    "dense products",
    "grouped products",
    "attention",
    "lm head",
    "expert rows",
    "elementwise",
    "sharding copies",
    "optimizer",
    COPIES,
    COMMUNICATION,
    IDLE,
)
_DIRECTIONS = {"to host": re.compile(r"Memcpy DtoH"), "to device": re.compile(r"Memcpy HtoD")}

Event = dict[str, Any]  # Chrome trace event, times in µs
Spans = list[tuple[float, float]]


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    try:
        answer = measure(BenchRequest.read(folder / "request.json"), rank, folder)
    except OrreryError as error:
        answer = {"error": str(error)}
    partial = folder / f".rank.{rank}"
    partial.write_text(json.dumps(answer))
    partial.replace(folder / f"rank.{rank}.json")
    if "steps" not in answer:
        os._exit(1)  # a normal exit would wait for collectives


def measure(request: BenchRequest, rank: int, folder: Path) -> dict[str, Any]:
    device = device_for(request.accelerator, rank)
    torch.manual_seed(request.seed + rank)
    store, size = None, request.num_devices
    if request.trainer.needs_fsdp:
        port = int(os.environ["ORRERY_BENCH_PORT"])
        store = dist.TCPStore("127.0.0.1", port, size, False, wait_for_workers=False)
    world = init_world(request.trainer.mesh, rank, device, store)
    learner = None
    try:
        begin_s = time.perf_counter()
        learner = make_learner(request, world)
        build_s = time.perf_counter() - begin_s
        memory_at_start = memory(device)
        options = request.options
        warmup = timed_steps(learner, request, 0, options.warmup)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with read_clocks(device, world.is_first) as clocks:
            steps = timed_steps(learner, request, options.warmup, options.steps)
        answer = {
            "clocks": clocks,
            "build_s": build_s,
            "warmup": warmup,
            "steps": steps,
            "memory_before_steps": memory_at_start,
            "memory": memory(device),
            "num_parameters": sum(weight.numel() for weight in learner.policy.parameters()),
            "num_trained_parameters": sum(weight.numel() for weight in learner.weights.values()),
            "device_bytes": device_bytes(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        }
        answer |= profiled_step(learner, request, folder, world)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        step = None if learner is None else learner.step + 1
        model, trainer = request.model, request.trainer
        text = describe_error(error, rank, step, model, trainer, request.load, size)
        return {"out_of_memory": text}
    destroy_world(world)  # skipped after an error, because collectives may hang
    return answer


def make_learner(request: BenchRequest, world: World) -> Learner:
    trainer = request.trainer
    policy = build_policy(request.model, trainer, world)
    # Initial values do not depend on offload, so losses are comparable.
    weights.initialize_on_device(policy.network, STD, request.seed, world.device)
    with torch.no_grad():
        for _, adapter in lora.adapters(policy.network):
            for weight in (adapter.a, adapter.b):  # products of zeros would run faster
                local_tensor(weight).normal_(std=STD)
    replays_routes = request.options.routing == "balanced"
    arguments = trainer, trainer.optimizer, trainer.max_grad_norm, replays_routes
    return Learner(policy, world, *arguments)


def timed_steps(
    learner: Learner, request: BenchRequest, first: int, count: int
) -> list[dict[str, Any]]:
    world = learner.world
    batches = [micro_batches(request, first + number, world.data_rank) for number in range(count)]
    totals = [count_totals(each, world) for each in batches]
    answers = []
    wait_for(world.device)
    begin_s = time.perf_counter()
    for number in range(count):
        outcome = learner.learn(iter(batches[number]), len(batches[number]), totals[number], 1.0)
        if number == count - 1:
            wait_for(world.device)
        end_s = time.perf_counter()
        lengths = [int(length) for batch in batches[number] for length in batch.lengths]
        answers.append({"step_s": end_s - begin_s, "lengths": lengths, "metrics": outcome.metrics})
        begin_s = end_s
    return answers


def profiled_step(
    learner: Learner, request: BenchRequest, folder: Path, world: World
) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    options = request.options
    batches = micro_batches(request, options.warmup + options.steps, world.data_rank)
    totals = count_totals(batches, world)
    step = learner.optimizer.step

    def named_step(*args: Any, **keywords: Any) -> Any:
        with record_function("Optimizer.step"):
            return step(*args, **keywords)

    learner.optimizer.step = named_step  # type: ignore[method-assign]
    wait_for(world.device)
    with (
        profile(activities=activities) if world.is_first else nullcontext() as trace,
        record_function(STEP),
    ):
        learner.learn(iter(batches), len(batches), totals, 1.0)
        wait_for(world.device)
    if trace is None:
        return {}
    events = trace_events(trace, folder)
    copies = {direction: asdict(one) for direction, one in host_copies(events, STEP).items()}
    return {"phases": asdict(divide_step(events, STEP)), "host_copies": copies}


def trace_events(trace: profile, folder: Path) -> list[Event]:
    path = folder / "trace.json"
    trace.export_chrome_trace(str(path))
    return json.loads(path.read_text())["traceEvents"]


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device) -> dict[str, int]:
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {name: stats.get(key, 0) for name, key in MEMORY_FIELDS.items()}


@contextmanager
def read_clocks(device: torch.device, is_asked: bool = True) -> Iterator[dict[str, float]]:
    """Yield a dict. On exit, fill it with the GPU's mean clock and power."""
    found: dict[str, float] = {}
    command = shutil.which("nvidia-smi") if device.type == "cuda" and is_asked else None
    if command is None:
        yield found
        return
    # Pass a UUID, because nvidia-smi ignores CUDA_VISIBLE_DEVICES.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    with tempfile.TemporaryFile("w+") as file:
        with clock_reader(command, uuid, file.fileno()):
            yield found
        file.seek(0)
        found.update(mean_clocks(file.read()) or {})


@contextmanager
def clock_reader(command: str, uuid: str, output: int) -> Iterator["subprocess.Popen[bytes]"]:
    asked = [
        f"--id={uuid}",
        f"--query-gpu={','.join(CLOCK_FIELDS.values())}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={CLOCK_INTERVAL_MS}",
    ]
    process = subprocess.Popen(
        [command, *asked], stdout=output, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def mean_clocks(text: str) -> dict[str, float] | None:
    rows = [line.split(", ") for line in text.splitlines(keepends=True) if line.endswith("\n")]
    try:
        columns = zip(*([float(value) for value in row] for row in rows), strict=True)
        return dict(zip(CLOCK_FIELDS, map(statistics.fmean, columns), strict=True))
    except ValueError:
        return None


@dataclass(frozen=True)
class Phases:
    """Seconds of the parts of one profiled step. `by_kind` adds up to `step_s`."""

    step_s: float
    by_kind: dict[str, float]
    by_pass: dict[str, dict[str, float]]
    communication_total_s: float  # includes communication that overlaps computation
    num_kernels: int
    longest: list[tuple[str, str, float, int]]  # slowest kernels: (name, kind, seconds, launches)


@dataclass(frozen=True)
class TraceSpan:
    """Time span of a kernel, copy or operator, in µs."""

    begin: float
    end: float
    kind: str
    name: str
    stage: str


@dataclass(frozen=True)
class HostCopies:
    num_bytes: int
    num_copies: int
    seconds: float
    hidden_s: float  # part of `seconds` that overlaps with computation


def divide_step(events: list[Event], step: str) -> Phases:
    """Divide the profiled step's time by kernel kind, pass and kernel.

    Where kinds overlap, `by_kind` prefers computation to copies, and copies to communication.
    """
    begin, end = _step_window(events, step)
    found = [one for one in _trace_spans(events, step) if one.end > begin and one.begin < end]
    by_kind = {kind: time_us / 1e6 for kind, time_us in _exclusive(found, begin, end).items()}
    by_pass: dict[str, dict[str, float]] = {}
    totals: dict[tuple[str, str], tuple[float, int]] = {}
    for span in found:
        seconds = (span.end - span.begin) / 1e6
        row = by_pass.setdefault(span.stage, {})
        row[span.kind] = row.get(span.kind, 0.0) + seconds
        total, count = totals.get((span.name, span.kind), (0.0, 0))
        totals[span.name, span.kind] = total + seconds, count + 1
    rows = ((name[:120], kind, *total) for (name, kind), total in totals.items())
    longest = sorted(rows, key=lambda row: -row[2])[:25]
    communication = _union([(one.begin, one.end) for one in found if one.kind == COMMUNICATION])
    total_s = _length(communication) / 1e6
    return Phases((end - begin) / 1e6, by_kind, by_pass, total_s, len(found), longest)


def host_copies(events: list[Event], step: str) -> dict[str, HostCopies]:
    begin, end = _step_window(events, step)

    def union(found: list[Event]) -> Spans:
        return _union([(max(e["ts"], begin), min(e["ts"] + e["dur"], end)) for e in found])

    timed = (event for event in events if event.get("ph") == "X" and "dur" in event)
    inside = [event for event in timed if event["ts"] < end and event["ts"] + event["dur"] > begin]
    kernels = [event for event in inside if event.get("cat") == "kernel"]
    if not kernels:
        return {}
    computing = union([one for one in kernels if kind_of(one["name"], ()) != COMMUNICATION])
    transfers = [event for event in inside if event.get("cat") == "gpu_memcpy"]
    result = {}
    for direction, pattern in _DIRECTIONS.items():
        copies = [event for event in transfers if pattern.match(event["name"])]
        copying = union(copies)
        num_bytes = sum(int(event.get("args", {}).get("bytes", 0)) for event in copies)
        hidden = _length(copying) + _length(computing) - _length(_union(copying + computing))
        seconds = _length(copying) / 1e6
        result[direction] = HostCopies(num_bytes, len(copies), seconds, hidden / 1e6)
    return result


def kind_of(name: str, around: Iterable[str]) -> str:
    """Return a kernel's kind. `around`: profiler ranges around the launch."""
    around = tuple(around)
    for kind, own, outer in _RULES:
        if own is not None and not re.search(own, name):
            continue
        if outer is None or any(re.search(outer, one) for one in around):
            return kind
    return "elementwise"


def _stage_of(around: tuple[str, ...]) -> str:
    """Return "forward" (with loss), "backward" (with recomputation) or "optimizer"."""
    if any("ptimizer.step" in one for one in around):
        return "optimizer"
    return "backward" if any(one.startswith("autograd::engine") for one in around) else "forward"


def _trace_spans(events: list[Event], step: str) -> list[TraceSpan]:
    on_device = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ranges = [one for one in events if one.get("ph") == "X"]
    host = [one for one in ranges if one.get("cat") in ("cpu_op", "user_annotation")]
    if not on_device:
        return [span for span in _host_spans(host) if span.name != step]
    launches = [one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")]
    calls = [one for one in launches if "correlation" in one.get("args", {})]
    open_at = {call["args"]["correlation"]: around for call, around in _enclosing(host, calls)}
    found = []
    for event in on_device:
        around = open_at.get(event.get("args", {}).get("correlation"), ())
        kind = kind_of(event["name"], around)
        if event["cat"] != "kernel" and kind != "optimizer":
            kind = COPIES
        end, stage = event["ts"] + event["dur"], _stage_of(around)
        found.append(TraceSpan(event["ts"], end, kind, event["name"], stage))
    return found


def _step_window(events: list[Event], step: str) -> tuple[float, float]:
    for event in events:
        is_range = event.get("ph") == "X" and event.get("cat") == "user_annotation"
        if is_range and event.get("name") == step:
            return event["ts"], event["ts"] + event["dur"]
    raise ValueError(f"the trace has no range {step!r}")


def _by_thread(events: list[Event]) -> dict[Any, list[Event]]:
    threads = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    for each in threads.values():
        each.sort(key=lambda event: (event["ts"], -event["dur"]))
    return threads


def _enclosing(ranges: list[Event], calls: list[Event]) -> Iterator[tuple[Event, tuple[str, ...]]]:
    outer = _by_thread(ranges)
    for thread, inner in _by_thread(calls).items():
        ahead = outer.get(thread, [])
        stack: list[tuple[float, str]] = []
        at = 0
        for call in inner:
            while at < len(ahead) and ahead[at]["ts"] <= call["ts"]:
                begin = ahead[at]["ts"]
                while stack and stack[-1][0] <= begin:
                    stack.pop()
                stack.append((begin + ahead[at]["dur"], ahead[at]["name"]))
                at += 1
            while stack and stack[-1][0] <= call["ts"]:
                stack.pop()
            yield call, tuple(name for _, name in stack)


def _host_spans(host: list[Event]) -> Iterator[TraceSpan]:
    for ranges in _by_thread(host).values():
        edges = [(event["ts"] + event["dur"], 0, -i, event) for i, event in enumerate(ranges)]
        edges += [(event["ts"], 1, i, event) for i, event in enumerate(ranges)]
        # At equal times, inner ranges end first and outer ranges begin first.
        edges.sort(key=lambda edge: edge[:3])
        open_ranges: list[Event] = []
        clock = 0.0
        for at, opens, _, event in edges:
            if open_ranges and at > clock and open_ranges[-1]["cat"] == "cpu_op":
                around = tuple(one["name"] for one in open_ranges)
                name, stage = around[-1], _stage_of(around)
                yield TraceSpan(clock, at, kind_of(name, around), name, stage)
            clock = at
            if opens:
                open_ranges.append(event)
            elif event in open_ranges:
                open_ranges.remove(event)


def _exclusive(found: list[TraceSpan], begin: float, end: float) -> dict[str, float]:
    edges: list[tuple[float, int, str]] = []
    for span in found:
        edges += [(max(span.begin, begin), 1, span.kind), (min(span.end, end), -1, span.kind)]
    edges.sort()
    time_us, running, clock = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0), begin
    for at, change, kind in [*edges, (end, 0, IDLE)]:
        if at > clock:
            active = [each for each, count in running.items() if count]
            owners = [each for each in active if each not in (COPIES, COMMUNICATION)]
            if not owners:  # `active` is in KINDS' order, with copies before communication
                owners = active[:1] or [IDLE]
            for owner in owners:
                time_us[owner] += (at - clock) / len(owners)
            clock = at
        running[kind] += change
    return time_us


def _union(spans: Spans) -> Spans:
    result: Spans = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif begin < end:
            result.append((begin, end))
    return result


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


if __name__ == "__main__":
    main()
