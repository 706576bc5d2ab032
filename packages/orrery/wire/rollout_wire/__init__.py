"""Rollout wires: batches from the orchestrator to the trainer's ranks. One file a kind.

- The receiver asks for (step, rank) and the sender answers once it has it. So a
  rank never joins too late, no batch is dropped, and a restarted rank asks
  again.
- `send` waits while `keep` earlier batches are unacknowledged by some rank.
- Micro-batches go one by one: neither end holds a whole batch.
- Every message carries its step. An acknowledged batch is refused, and so is a
  batch that would skip an earlier one.
"""

from collections.abc import Callable
from pathlib import Path

from orrery.manifest.errors import OrreryError
from orrery.wire.rollout_wire.contract import (
    Batch,
    ReceivedBatch,
    RolloutReceiver,
    RolloutSender,
)
from orrery.wire.rollout_wire.files import FilesReceiver, FilesSender
from orrery.wire.rollout_wire.zeromq import ZmqReceiver, ZmqSender

__all__ = [
    "KINDS",
    "Batch",
    "ReceivedBatch",
    "RolloutReceiver",
    "RolloutSender",
    "make_receiver",
    "make_sender",
]

KINDS: dict[str, tuple[Callable[..., RolloutSender], Callable[..., RolloutReceiver]]] = {
    "zmq": (ZmqSender, ZmqReceiver),
    "files": (FilesSender, FilesReceiver),
}


def _kind(kind: str) -> tuple[Callable[..., RolloutSender], Callable[..., RolloutReceiver]]:
    if kind not in KINDS:
        raise OrreryError(
            f"transport.rollouts: {kind!r} is not a rollout wire; choose from {', '.join(KINDS)}"
        )
    return KINDS[kind]


def make_sender(kind: str, run_dir: Path, host: str, port: int, num_ranks: int) -> RolloutSender:
    """Return the orchestrator's end. `port` 0 takes a free port."""
    return _kind(kind)[0](Path(run_dir), host, port, num_ranks)


def make_receiver(kind: str, run_dir: Path, url: str, rank: int) -> RolloutReceiver:
    """Return a trainer rank's end."""
    return _kind(kind)[1](Path(run_dir), url, rank)
