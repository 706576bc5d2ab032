"""Compare ways to keep optimizer state on the host, at 2 and at 8 micro-batches a step.

- plain: state on the device. streamed: `memory.optimizer_offload`. A quarter or half resident: the
  same with `optimizer_offload_resident: 0.25` or 0.5. after the step: copies overlap with the
  update only. FSDP: `fsdp.cpu_offload`.
- host-stepped: a lower bound of the time. The micro-batches, then torch's threaded AdamW on the
  host. Copies of gradients and weights count as hidden.
- The model is Qwen3-4B with as many layers as the plan fits on the device. Checked first: state
  that streams in slots gives the bits of state on the device.

    python benchmarks/trainer/offload.py [--smoke]
"""

import gc
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from timing import copy_out, seconds

from orrery.manifest.budget.parameters import count_parameters
from orrery.manifest.budget.trainer_memory import num_states, plan_memory, state_rooms
from orrery.manifest.budget.trainer_time import step_s
from orrery.manifest.devices import rates_of
from orrery.manifest.identity import load
from orrery.manifest.schema import AdamW
from orrery.trainer import grow_segments
from orrery.trainer.bench import BenchRequest, Options, make_request
from orrery.trainer.bench.rank import make_learner, timed_steps
from orrery.trainer.learner import Learner
from orrery.trainer.optim import BucketedOptimizer, make_optimizer
from orrery.trainer.parallel.world import destroy_world, device_for, init_world
from record import parser_of, record

ROOT = Path(__file__).resolve().parents[2]
PLAIN, AFTER, STREAMED, FSDP = "plain", "after the step", "streamed", "FSDP's CPU offload"
QUARTER, HALF = "a quarter resident", "half resident"


def away(resident: float) -> dict[str, str]:
    memory = {"optimizer_offload": True, "optimizer_offload_resident": resident}
    return {"memory": json.dumps(memory)}


FIELDS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    STREAMED: away(0.0),
    QUARTER: away(0.25),
    HALF: away(0.5),
    AFTER: away(0.0),
    FSDP: {"fsdp": json.dumps({"cpu_offload": True})},
}
COUNTS = (2, 8)
GOALS = {2: 0.8, 8: 0.95}
CAPACITY_SHARE = 0.86  # of device memory that the plan of the plain variant may take
HOST_VALUES = 1 << 28


def options(smoke: bool) -> tuple[str, Options]:
    if smoke:
        small = Options(device="cpu", loss="sft", tokens_per_micro_batch=64, document_tokens=16)
        return "reverse_text", replace(small, devices=1, layers=2)
    return "qwen3_4b_16k", Options(loss="sft", devices=1, tokens_per_micro_batch=8192)


def requests(smoke: bool, capacity: int) -> dict[str, BenchRequest]:
    """Return each variant's request, with the most layers whose plain variant fits."""
    name, start = options(smoke)
    manifest = load(ROOT / "manifests" / f"{name}.json")
    layers = start.layers or manifest.model.num_layers
    while not smoke:
        plain = make_request(manifest, replace(start, layers=layers, micro_batches=8))
        planned = plan_memory(plain.model, plain.trainer, plain.load, capacity).peak_bytes
        if planned <= CAPACITY_SHARE * capacity:
            break
        layers -= 1
    return {
        variant: make_request(manifest, replace(start, layers=layers, **fields))
        for variant, fields in FIELDS.items()
    }


def measure(variant: str, request: BenchRequest, smoke: bool) -> dict[int, dict[str, Any]]:
    """Return a row for each number of micro-batches."""
    device = device_for(request.accelerator, 0)
    store = None
    if request.trainer.needs_fsdp:
        store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    torch.manual_seed(request.seed)
    world = init_world(request.trainer.mesh, 0, device, store)
    learner = make_learner(request, world)
    if variant == AFTER and learner.optimizer.offload is not None:
        learner.state_stream, learner.optimizer.offload.drains_late = None, False
    found = {}
    for count in COUNTS:
        one = replace(request, options=replace(request.options, micro_batches=count))
        is_short = smoke or variant == FSDP
        timed_steps(learner, one, 0, 1 if is_short else 2)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps = timed_steps(learner, one, 2, 1 if is_short else 3)
        found[count] = row(variant, count, one, statistics.fmean(each["step_s"] for each in steps))
        found[count]["grad_norm"] = steps[-1]["metrics"]["grad_norm"]
        found[count]["weights_sum"] = weights_sum(learner)
    destroy_world(world)
    return found


def row(variant: str, count: int, request: BenchRequest, measured_s: float) -> dict[str, Any]:
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    load = replace(request.load, micro_batches=count)
    capacity = torch.cuda.get_device_properties(0).total_memory if peak else 0
    model, trainer = request.model, request.trainer
    lengths = [request.document_tokens] * (load.tokens // request.document_tokens * count)
    accelerator = "cpu" if request.accelerator == "cpu" else "h200"
    return {
        "variant": f"{variant}, {count} micro-batches",
        "value": count * request.tokens_per_micro_batch / measured_s,
        "unit": "tokens/s/GPU",
        "goal": None,
        "step_s": measured_s,
        "planned_s": step_s(model, trainer, count, lengths, rates_of(accelerator))["step"],
        "peak_allocated_bytes": peak,
        "planned_peak_bytes": plan_memory(model, trainer, load, capacity).peak_bytes,
    }


def weights_sum(learner: Learner) -> float:
    sums = [weight.detach().double().sum().item() for weight in learner.weights.values()]
    return sum(sums)


def host_step_s(num_values: int, share: float) -> float:
    """Return the seconds of torch's fused AdamW on the host for `num_values`, measured on a part.

    One call has as many threads as torch takes, and one read and write of each state.
    """
    part = min(num_values, int(HOST_VALUES * share))
    size = part // 16
    weights, gradients, firsts, seconds_ = (
        [torch.full((size,), 1e-3) for _ in range(16)] for _ in range(4)
    )
    steps = [torch.ones(()) for _ in range(16)]

    def step() -> None:
        adamw(
            weights,
            gradients,
            firsts,
            seconds_,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.95,
            lr=1e-6,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )

    times = []
    for _ in range(4):
        begin_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin_s)
    return min(times[1:]) * num_values / (16 * size)


def link_rates(device: torch.device, num_bytes: int = 1 << 30) -> dict[str, float]:
    """Return bytes per second of pinned copies: in, out, and each way at once."""
    if device.type != "cuda":
        return {}
    host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy(inward: bool) -> None:
        with torch.cuda.stream(streams[inward]):
            to, of = (there, host) if inward else (host, there)
            to[inward].copy_(of[inward], non_blocking=True)

    found = {}
    for name, ways in {"in": [True], "out": [False], "each way at once": [True, False]}.items():
        times = []
        for _ in range(4):
            torch.cuda.synchronize(device)
            begin_s = time.perf_counter()
            for way in ways:
                copy(way)
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin_s)
        found[name] = num_bytes / min(times[1:])
    return found


class Rows(nn.Module):
    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(1)
        size = (rows, 1024)
        self.weights = nn.ParameterList(torch.randn(size, device=device) for _ in range(24))


def check_bits(device: torch.device, rows: int) -> None:
    """Exit unless steps with state in many, few and recycled slots give the plain steps' bits."""
    spec = AdamW(kind="adamw", lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    one, two = Rows(rows, device), Rows(rows, device)
    plain = make_optimizer(one, spec)
    groups = make_optimizer(two, spec).groups
    streamed = BucketedOptimizer(groups, True, bucket_bytes=rows * 1024 * 4)
    offload = streamed.offload
    assert offload is not None
    offload.drains_late = True
    slot_bytes = rows * 1024 * 4
    for step, slots in enumerate((12, 40, 0, 5, 40)):
        generator = torch.Generator(device).manual_seed(step)
        for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, device=device, generator=generator)
            theirs.grad = ours.grad.clone()
        busy: Tensor = torch.randn(2048, 2048, device=device)
        for room in (0, slots // 2, slots):
            busy = busy @ busy / 2048  # kernels that reuse the memory of freed slots
            offload.fill(room * slot_bytes)
        plain.step()
        streamed.step()
        for room in (20, 3, 0):
            offload.drain(room * slot_bytes)
            busy = torch.randn(rows, 1024, device=device).sum()[None]
    for index, (ours, theirs) in enumerate(zip(one.parameters(), two.parameters(), strict=True)):
        if not torch.equal(ours, theirs):
            sys.exit(f"weight {index}: streamed state gives other bits than state on the device")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU, no record")
    parser.add_argument("--seconds", type=float, default=170, help="start no variant after this")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    grow_segments()
    smoke = arguments.smoke
    if not smoke and not torch.cuda.is_available():
        sys.exit("offload: there is no GPU here; run it on a host with one, or with --smoke")
    device = torch.device("cpu" if smoke else "cuda")
    capacity = 0 if smoke else torch.cuda.get_device_properties(0).total_memory
    check_bits(device, 8 if smoke else 4096)
    links = link_rates(device)
    asked = requests(smoke, capacity)
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for variant, request in asked.items():
        if seconds() > arguments.seconds:
            failed[variant] = "out of time"
            continue
        try:
            rows[variant] = measure(variant, request, smoke)
        except Exception as error:
            failed[variant] = f"{type(error).__name__}: {str(error)[:400]}"
        gc.collect()
        if not smoke:
            torch.cuda.empty_cache()
        for one in rows.get(variant, {}).values():
            print(f"{one['variant']}: {one['step_s']:.3f} s, planned {one['planned_s']:.3f}")
        print(f"{variant}: {failed.get(variant, 'done')} after {seconds()} s", flush=True)
    first = asked[STREAMED]
    counted = count_parameters(first.model, None)
    values = sum(unit.trained for unit in counted.units)
    host_s = host_step_s(values, 2**-10 if smoke else 1.0)
    plain = rows[PLAIN]
    batch_s = (plain[8]["step_s"] - plain[2]["step_s"]) / 6
    rows["host-stepped, at best"] = {
        count: row("host-stepped, at best", count, first, count * batch_s + host_s)
        for count in COUNTS
    }
    for found in rows.values():
        for count, one in found.items():
            one |= {"tokens_per_s": one["value"], "unit": "of the plain speed"}
            one["value"] = plain[count]["step_s"] / one["step_s"]
            if one["variant"].startswith((STREAMED, QUARTER, HALF)):
                one |= {"goal": GOALS[count], "better": "higher"}
            print(f"{one['variant']:44}{one['value']:7.3f} of the plain speed")
    if smoke or STREAMED not in rows:
        print(failed or "nothing recorded")
        return
    many = state_rooms(first.model, first.trainer, 2, capacity, counted)
    state_bytes = 4 * num_states(first.trainer.optimizer, counted)
    record(
        arguments.output,
        figure="trainer: speed with optimizer state on the host, 2 micro-batches a step",
        value=rows[STREAMED][2]["value"],
        unit="of the plain speed",
        goal=GOALS[2],
        better="higher",
        details={
            "model": f"Qwen3-4B, {first.model.num_layers} layers, {values:,} weights",
            "tokens_per_micro_batch": first.tokens_per_micro_batch,
            "micro_batch_s": batch_s,
            "state_bytes_each_way": state_bytes,
            "link_bytes_per_s": links,
            "host_step_s": host_s,
            "host_threads": torch.get_num_threads(),
            "arriving_room_bytes": many.arriving[0],
            "failed": failed,
        },
        rows=[one for found in rows.values() for one in found.values()],
    )
    copy_out(arguments.output)


if __name__ == "__main__":
    main()
