"""Starts one process a device for a measurement, ends them together, gathers what they say.

- They meet at a store that this process serves on loopback.
- The first that fails ends all; its sentence, or else the last lines that it wrote, is the error.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from orrery.manifest.errors import RunFailed
from orrery.trainer import ALLOCATOR, EXPANDABLE
from orrery.trainer.bench.request import Request


def run_ranks(request: Request, folder: Path, deadline_s: float) -> list[dict[str, Any]]:
    """Every rank's answer, in rank order. Raises RunFailed."""
    request.write(folder / "request.json")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = dist.TCPStore(
        "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    environment = {ALLOCATOR: EXPANDABLE, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ}
    environment |= {
        "ORRERY_BENCH_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ranks = []
    try:
        for rank in range(request.num_devices):
            with (folder / f"rank.{rank}.log").open("w") as log:
                command = [sys.executable, "-m", "orrery.trainer.bench.rank", str(folder)]
                ranks.append(
                    subprocess.Popen(
                        command,
                        env={**environment, "RANK": str(rank)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _watch(ranks, folder, time.monotonic() + deadline_s)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
        del server
    return [
        json.loads((folder / f"rank.{rank}.json").read_text())
        for rank in range(request.num_devices)
    ]


def _watch(ranks: list[subprocess.Popen[bytes]], folder: Path, deadline_s: float) -> None:
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            time.sleep(1.0)  # others that fail of the same cause write their sentences too
            raise RunFailed(_sentence(ranks, folder, failed[0]))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline_s:
            silent = [
                rank for rank in range(len(ranks)) if not (folder / f"rank.{rank}.json").exists()
            ]
            words = "\n".join(
                f"rank {rank} last wrote: {_tail(folder, rank, 8)}" for rank in silent[:4]
            )
            raise RunFailed(
                f"the measurement took longer than its deadline, and ranks {silent} have no result yet\n{words}"
            )
        time.sleep(0.05)


def _sentence(ranks: list[subprocess.Popen[bytes]], folder: Path, first: int) -> str:
    answers = {}
    for rank in range(len(ranks)):
        path = folder / f"rank.{rank}.json"
        if path.exists():
            answers[rank] = json.loads(path.read_text())
    full = [answer["out_of_memory"] for answer in answers.values() if "out_of_memory" in answer]
    if full:
        return full[0] + (f" ({len(full)} ranks of {len(ranks)} did)" if len(full) > 1 else "")
    for answer in answers.values():
        if "error" in answer:
            return answer["error"]
    return f"rank {first} ended with code {ranks[first].returncode}: {_tail(folder, first)}"


def _tail(folder: Path, rank: int, num_lines: int = 30) -> str:
    lines = (folder / f"rank.{rank}.log").read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-num_lines:]) or "nothing"
