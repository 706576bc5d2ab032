"""Measure pack + send + receive of rollouts, with both processes on one core.

256 rollouts of 131,072 tokens, with the usual columns and a column of 624 opaque bytes a token (21
GB), are packed into micro-batches of 131,072 tokens and sent over loopback to another process.
Rollouts are windows into one random buffer, so making them costs nothing. Micro-batches of sixteen
documents are measured too.

    python benchmarks/transport/pack_and_wire.py
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.wire.columns import Columns
from orrery.wire.packing import LazyMicroBatches, micro_batches, pack
from orrery.wire.rollout_wire import Batch, RolloutReceiver, RolloutSender
from record import parser_of, record

ROLLOUT_TOKENS = 131_072
OPAQUE_SHAPE = (78, 8)  # layers, experts a token: uint8, 624 bytes


class Rollouts(Sequence[Columns]):
    """`num` documents of `tokens` tokens, made on access as windows into one random buffer."""

    def __init__(self, num: int, tokens: int) -> None:
        self.num, self.tokens = num, tokens
        rng = np.random.default_rng(0)
        self.opaque = rng.integers(0, 256, (tokens + 256, *OPAQUE_SHAPE), dtype=np.uint8)
        self.token_id = rng.integers(0, 150_000, tokens, dtype=np.int32)
        self.logprob = rng.standard_normal(tokens).astype(np.float32)
        self.trained = np.ones(tokens, bool)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.num:
            raise IndexError(index)
        start = index % 256
        return Columns(
            np.array([0, self.tokens]),
            {
                "token_id": self.token_id,
                "trained": self.trained,
                "logprob": self.logprob,
                "version": self.token_id,
                "advantage": self.logprob,
                "routed_experts": self.opaque[start : start + self.tokens],
            },
            {
                "temperature": np.ones(1, np.float32),
                "reward": np.full(1, index, np.float32),
                "group_id": np.array([index]),
            },
        )


def usage() -> dict[str, float]:
    """Return this program's peak resident bytes and CPU seconds.

    `ru_maxrss` would count its parent too.
    """
    [peak] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    ]
    return {"peak_rss_bytes": int(peak.split()[1]) * 1024, "cpu_s": time.process_time()}


def used_since(before: dict[str, float]) -> dict[str, float]:
    after = usage()
    return {
        "peak_rss_bytes": after["peak_rss_bytes"],
        "peak_rss_before_bytes": before["peak_rss_bytes"],
        "cpu_s": after["cpu_s"] - before["cpu_s"],
    }


def ends_of(columns: Columns) -> int:
    """Return a sum over the first and last opaque row of every document."""
    routed = columns.token["routed_experts"]
    return int(
        routed[columns.offsets[:-1]].sum(dtype=np.int64)
        + routed[columns.offsets[1:] - 1].sum(dtype=np.int64)
    )


def receive(url: str) -> None:
    """Receive a batch as the trainer does. Print sizes, a checksum and usage as JSON."""
    before = usage()
    receiver = RolloutReceiver(url, 0)
    received = receiver.receive(1, deadline_s=120)
    num_bytes = num_tokens = num_samples = 0
    checksum = 0
    for columns in received:
        num_tokens += columns.num_tokens
        num_samples += columns.num_samples
        num_bytes += sum(
            column.nbytes
            for column in (*columns.token.values(), *columns.sample.values(), columns.offsets)
        )
        checksum += ends_of(columns)
    seen = {
        "bytes": num_bytes,
        "tokens": num_tokens,
        "samples": num_samples,
        "checksum": checksum,
        "used": used_since(before),
    }
    receiver.close()
    print(json.dumps(seen))


async def send(num_rollouts: int, num_documents: int) -> dict[str, Any]:
    rollouts = Rollouts(num_rollouts * num_documents, ROLLOUT_TOKENS // num_documents)
    before = usage()
    sender = RolloutSender("127.0.0.1", 0, 1)
    argv = [sys.executable, __file__, "--receive", sender.url]
    receiver = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    await sender.wanted(at_least=1)  # do not time the receiver's start
    start = time.perf_counter()
    plan = pack(np.full(len(rollouts), rollouts.tokens), 1, ROLLOUT_TOKENS, quadratic=1e-5)
    pack_s = time.perf_counter() - start
    [lazy] = micro_batches(rollouts, plan)
    await sender.send(
        Batch(1, [LazyMicroBatches(len(lazy), lazy.__getitem__)], {"num_samples": len(rollouts)})
    )
    await sender.drained(600)
    wall_s = time.perf_counter() - start
    seen = json.loads((await receiver.communicate())[0])
    sender.close()
    assert seen["samples"] == len(rollouts) and seen["tokens"] == len(rollouts) * rollouts.tokens, (
        seen
    )
    assert seen["checksum"] == sum(ends_of(rollouts[index]) for index in range(len(rollouts))), (
        "what arrived is not what was sent"
    )
    return {
        "documents_a_micro_batch": num_documents,
        "bytes": seen["bytes"],
        "tokens": seen["tokens"],
        "wall_s": wall_s,
        "pack_s": pack_s,
        "gigabytes_per_s": seen["bytes"] / wall_s / 1e9,
        "tokens_per_s": seen["tokens"] / wall_s,
        "sender": used_since(before),
        "receiver": seen["used"],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--receive", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument(
        "--num-rollouts",
        type=int,
        default=256,
        help="fewer for a quick look; only the full size is recorded",
    )
    args = parser.parse_args()
    if args.receive:
        receive(args.receive)
        return
    load_before = os.getloadavg()[0]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # inherited by the receiver
    rows = [asyncio.run(send(args.num_rollouts, documents)) for documents in (1, 16)]
    for row in rows:
        print(
            f"{row['documents_a_micro_batch']} documents a micro-batch: "
            f"{row['gigabytes_per_s']:.2f} GB/s, "
            f"peak {row['sender']['peak_rss_bytes'] / 1e6:.0f} MB sender, "
            f"{row['receiver']['peak_rss_bytes'] / 1e6:.0f} MB receiver"
        )
    if args.num_rollouts == 256:
        record(
            Path(__file__).with_suffix(".json"),
            figure="pack, send and receive of 256 rollouts of 131,072 tokens (21 GB) "
            "over loopback on one core",
            value=rows[0]["gigabytes_per_s"],
            unit="GB/s",
            goal=1.0,
            better="higher",
            details={"load_average_before": load_before, "variants": rows},
        )


if __name__ == "__main__":
    main()
