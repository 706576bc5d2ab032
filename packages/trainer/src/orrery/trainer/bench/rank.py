"""`python -m orrery.trainer.bench.rank FOLDER`: one rank of a measurement; `start.py` sets RANK and where the ranks meet.

- The policy is built as in training: without storage, parallel and sharded from outside, weights drawn on the device.
- A step is on the clock from the first micro-batch to the weights' end, between two waits for the device. Batches are made before.
- After the measured steps comes one more under torch's profiler, on the first rank alone; it is in no other number.
- Out: `FOLDER/rank.<n>.json` with its numbers, or with the sentence that it failed with.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from orrery.manifest.errors import OrreryError
from orrery.models import lora, weights
from orrery.models.placement import local_tensor
from orrery.trainer.bench import phases
from orrery.trainer.bench.batches import micro_batches
from orrery.trainer.bench.clocks import read_clocks
from orrery.trainer.bench.host_copies import host_copies
from orrery.trainer.bench.request import Request
from orrery.trainer.learner import Learner, count_totals
from orrery.trainer.memory_plan.out_of_memory import describe_error, device_bytes, is_out_of_memory
from orrery.trainer.parallel import build_policy, fsdp
from orrery.trainer.parallel.world import World, destroy_world, device_for, init_world

STEP = "orrery.step"
STD = 0.02


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    try:
        answer = measure(Request.read(folder / "request.json"), rank, folder)
    except OrreryError as error:
        answer = {"error": str(error)}
    partial = folder / f".rank.{rank}"
    partial.write_text(json.dumps(answer))
    partial.replace(folder / f"rank.{rank}.json")
    if "steps" not in answer:
        os._exit(
            1
        )  # collectives of the other ranks may be in flight: an orderly end would wait for them


def measure(request: Request, rank: int, folder: Path) -> dict[str, Any]:
    """This rank's numbers."""
    device = device_for(request.accelerator, rank)
    torch.manual_seed(request.seed + rank)
    world = init_world(
        request.trainer.mesh,
        rank,
        device,
        store(request) if fsdp.is_needed(request.trainer) else None,
    )
    learner = None
    try:
        begin_s = time.perf_counter()
        learner = make_learner(request, world)
        build_s = time.perf_counter() - begin_s
        memory_at_start = memory(device)
        warmup = timed_steps(learner, request, 0, request.warmup)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with read_clocks(device, world.is_first) as clocks:
            steps = timed_steps(learner, request, request.warmup, request.steps)
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
        return {
            "out_of_memory": describe_error(
                error, rank, step, request.model, request.trainer, request.load, request.num_devices
            )
        }
    destroy_world(
        world
    )  # here alone: ranks that failed leave collectives in flight, and end without order
    return answer


def store(request: Request) -> dist.Store:
    """The store that `start.py` serves on loopback."""
    return dist.TCPStore(
        "127.0.0.1",
        int(os.environ["ORRERY_BENCH_PORT"]),
        request.num_devices,
        False,
        wait_for_workers=False,
    )


def make_learner(request: Request, world: World) -> Learner:
    """As `orrery.trainer.assemble` does, with weights drawn where they are."""
    trainer = request.trainer
    policy = build_policy(request.model, trainer, world)
    weights.initialize_on_device(policy.network, STD, request.seed)
    with torch.no_grad():
        for _, adapter in lora.adapters(policy.network):
            for weight in (
                adapter.a,
                adapter.b,
            ):  # neither is zero: products of zeros draw less power, and so run faster
                local_tensor(weight).normal_(std=STD)
    return Learner(policy, world, trainer, trainer.optimizer, trainer.max_grad_norm)


def timed_steps(learner: Learner, request: Request, first: int, count: int) -> list[dict[str, Any]]:
    """Steps of the learner, one after the other as in training with batches that are there, and how long each took here.

    The host comes back from a step while the device still moves weights; so a step is from one return to the next.
    """
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


def profiled_step(learner: Learner, request: Request, folder: Path, world: World) -> dict[str, Any]:
    """One more step, under the profiler on the first rank: its time by kind of work, and what host copies of it hide.

    The trace stays as FOLDER/trace.json.
    """
    activities = [ProfilerActivity.CPU] + (
        [ProfilerActivity.CUDA] if world.device.type == "cuda" else []
    )
    batches = micro_batches(request, request.warmup + request.steps, world.data_rank)
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
    path = folder / "trace.json"
    trace.export_chrome_trace(str(path))
    events = phases.read(path)
    copies = {direction: asdict(one) for direction, one in host_copies(events, STEP).items()}
    return {"phases": asdict(phases.divide(events, STEP)), "host_copies": copies}


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device) -> dict[str, int]:
    """Bytes; zero on a CPU, where torch does not count."""
    if device.type != "cuda":
        return {
            "peak_allocated_bytes": 0,
            "peak_reserved_bytes": 0,
            "allocated_bytes": 0,
            "num_allocation_retries": 0,
        }
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "num_allocation_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }


if __name__ == "__main__":
    main()
