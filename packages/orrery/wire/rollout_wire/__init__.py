"""Send batches from the orchestrator to the trainer's ranks. One file per kind of wire.

- The receiver asks for (step, rank). The sender answers once it has that batch. So a rank can join
  at any time, no batch is dropped, and a restarted rank asks again.
- `send` waits while any rank has not acknowledged `keep` earlier batches.
- Micro-batches are sent one by one, so neither end copies a whole batch.
- A receiver that asks for an acknowledged batch, or skips a batch, is refused.
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
            f"transport.rollouts: {kind!r} is not a rollout wire. Choose from {', '.join(KINDS)}"
        )
    return KINDS[kind]


def make_sender(kind: str, run_dir: Path, host: str, port: int, num_ranks: int) -> RolloutSender:
    return _kind(kind)[0](Path(run_dir), host, port, num_ranks)


def make_receiver(kind: str, run_dir: Path, url: str, rank: int) -> RolloutReceiver:
    return _kind(kind)[1](Path(run_dir), url, rank)
