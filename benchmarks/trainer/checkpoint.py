"""Measure the wait and the writing time of a checkpoint of N GB per rank.

Each rank holds weights and AdamW's state as the trainer does, and saves them four times. Steps
(matrix products) run with and without a save in flight. The ratio of their times is the cost of
writing and hashing. The first save, which also reserves the host buffer, is counted apart.

    python benchmarks/trainer/checkpoint.py --gigabytes 1
    python benchmarks/trainer/checkpoint.py --gigabytes 40 --ranks 8 --folder /scratch
"""

import json
import multiprocessing
import shutil
import socket
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.schema import AdamW, Mesh
from orrery.trainer.checkpoint import state_of
from orrery.trainer.checkpoint_writer import CheckpointWriter
from orrery.trainer.optim import make_optimizer
from orrery.trainer.parallel.world import World, destroy_world, init_world
from orrery.trainer.saver import checksum_file
from orrery.wire import checkpoints
from record import ROOT, parser_of, record

WIDTH = 4096
NUM_SAVES = 4
NUM_QUIET_STEPS = 20
ADAMW = AdamW(kind="adamw", lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)


def holder(num_bytes: int, world: World) -> Any:
    """Return a fake learner: float32 matrices and their two moments, `num_bytes` a rank."""
    num_matrices = max(1, round(num_bytes * world.size / (3 * 4 * WIDTH * WIDTH)))
    with torch.device("meta" if world.mesh is not None else world.device):
        policy = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_matrices))
    if world.mesh is not None:
        for matrix in policy:
            fully_shard(matrix, mesh=world.fsdp_mesh)
        policy.to_empty(device=world.device)
    for weight in policy.parameters():
        nn.init.normal_(weight.to_local() if hasattr(weight, "to_local") else weight)
    weights = dict(policy.named_parameters())
    return SimpleNamespace(
        policy=policy,
        weights=weights,
        optimizer=make_optimizer(policy, ADAMW),
        world=world,
        step=0,
        base_sha256=None,
        expert_load=SimpleNamespace(biases={}),
        outer_momentum={},
        outer_start={},
    )


class Steps:
    """Steps of about the same length. `run` returns the seconds of one."""

    def __init__(self, device: torch.device):
        self._device = device
        size, self._repeat = (8192, 40) if device.type == "cuda" else (1024, 10)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._x = torch.randn(size, size, device=device, dtype=dtype) / size**0.5

    def run(self) -> float:
        begin_s, x = time.perf_counter(), self._x
        for _ in range(self._repeat):
            x = x @ self._x
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin_s


def one_copy_s(learner: Any, world: World) -> float:
    """Return the seconds of a plain copy of the state into resident memory."""
    tensors = [held.local for held in state_of(learner).values() if held.writes]
    pinned = world.device.type == "cuda"
    targets = [torch.zeros_like(one, device="cpu", pin_memory=pinned) for one in tensors]
    found = []
    for _ in range(NUM_SAVES):
        world.barrier()
        begin_s = time.perf_counter()
        for target, one in zip(targets, tensors, strict=True):
            target.copy_(one, non_blocking=True)
        if pinned:
            torch.cuda.synchronize(world.device)
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def measure(rank: int, size: int, port: int, num_bytes: int, folder: Path) -> None:
    """Run one rank. The first writes the measurements as JSON."""
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    mesh = Mesh(
        dp_replicate=1,
        dp_shard=size,
        cp=1,
        ep=1,
        cp_style="ulysses",
        ep_backend="torch",
        ep_chunks=1,
        deepep_num_sms=None,
        deepep_token_chunk_size=None,
    )
    store = None
    if size > 1:
        store = dist.TCPStore("127.0.0.1", port, size, rank == 0, wait_for_workers=False)
    world = init_world(mesh, rank, device, store)
    learner, steps, saves = holder(num_bytes, world), Steps(device), []
    held = sum(held.local.nbytes for held in state_of(learner).values() if held.writes)
    copy_s = one_copy_s(learner, world)
    with CheckpointWriter(world) as saver:
        begin_s = time.perf_counter()
        saver.reserve(learner)
        while not saver.is_idle:
            steps.run()
        saver.wait()
        reserve_s = time.perf_counter() - begin_s
        quiet = [steps.run() for _ in range(NUM_QUIET_STEPS)]
        for number in range(1, NUM_SAVES + 1):
            learner.step, target = number, checkpoints.checkpoint_dir(folder, number, 1)
            world.barrier()
            begin_s = time.perf_counter()
            blocked_s = saver.copy(learner, target / "trainer")
            files = [f"trainer/{checksum_file(other)}" for other in range(size)]
            saver.write(partial(checkpoints.complete, target, files))
            beside: list[float] = []
            while not saver.is_idle:
                beside.append(steps.run())
            saver.finish()
            saves.append(
                {
                    "blocked_s": blocked_s,
                    "total_s": time.perf_counter() - begin_s,
                    "step_s": statistics.median(beside),
                }
            )
            if world.is_first:
                checkpoints.verify(target)
                shutil.rmtree(target)
    destroy_world(world)
    if rank == 0:
        seen = {
            "bytes_a_rank": held,
            "copy_s": copy_s,
            "reserve_s": reserve_s,
            "quiet_step_s": statistics.median(quiet),
            "saves": saves,
        }
        (folder / "seen.json").write_text(json.dumps(seen))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--gigabytes", type=float, default=1.0, help="a rank, weights and optimizer state together"
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT, help="on the disk to write to")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if torch.cuda.is_available() and torch.cuda.device_count() < args.ranks:
        parser.error(f"--ranks {args.ranks}: there are {torch.cuda.device_count()} GPUs")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=".checkpoint_benchmark.") as scratch:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        argv = (args.ranks, port, int(args.gigabytes * 1e9), Path(scratch))
        ranks = [context.Process(target=measure, args=(rank, *argv)) for rank in range(args.ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"ranks ended with {[rank.exitcode for rank in ranks]}")
        seen = json.loads((Path(scratch) / "seen.json").read_text())
    first, *rest = seen["saves"]
    gigabytes = seen["bytes_a_rank"] / 1e9
    blocked_s, total_s = (
        statistics.median(save[key] for save in rest) for key in ("blocked_s", "total_s")
    )
    record(
        args.output,
        figure=f"training waits for a checkpoint of {args.gigabytes:g} GB a rank, a GB",
        value=blocked_s / gigabytes,
        unit="s/GB",
        goal=0.05 if torch.cuda.is_available() else None,
        better="lower",
        details={
            "ranks": args.ranks,
            "gigabytes_a_rank": gigabytes,
            "blocked_s": blocked_s,
            "one_copy_s": seen["copy_s"],
            "blocked_by_copies": blocked_s / seen["copy_s"],
            "blocked_s_of_the_first": first["blocked_s"],
            "total_s": total_s,
            "gigabytes_per_s_to_disk": gigabytes * args.ranks / total_s,
            "blocked_share": blocked_s / total_s,
            "reserve_s": seen["reserve_s"],
            "step_s_with_nothing_on_its_way": seen["quiet_step_s"],
            "step_s_beside_a_save": statistics.median(save["step_s"] for save in rest),
        },
    )


if __name__ == "__main__":
    main()
