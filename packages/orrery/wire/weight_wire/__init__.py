"""Send policy versions from trainer to engines. `wire/README.md` lists the wires."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest
from orrery.manifest.schema.manifest import DIRECT_KINDS
from orrery.wire.weight_wire.files import (
    WeightPublisher,
    WeightWatch,
    check_room,
    own,
    read_weights,
    remove_weight_dir,
    weight_dir,
)
from orrery.wire.weight_wire.leases import (
    Published,
    TransferFailed,
    WireFailed,
)

if TYPE_CHECKING:
    import torch

    from orrery.wire.weight_wire.transfer import WeightSender

__all__ = [
    "ADAPTER",
    "DIRECT_KINDS",
    "Published",
    "TransferFailed",
    "WeightPublisher",
    "WeightWatch",
    "WireFailed",
    "check_library",
    "check_room",
    "make_weight_sender",
    "read_weights",
    "remove_weight_dir",
    "served_model",
    "weight_dir",
]

ADAPTER = "adapter"


def served_model(manifest: Manifest, stage: str) -> str | None:
    return ADAPTER if manifest.transport.weights == "adapters" and stage == "rl" else None


def make_weight_sender(
    kind: str,
    run_dir: Path,
    attempt: int,
    num_nodes: int,
    host: str,
    rank: int,
    num_ranks: int,
    device: "torch.device",
) -> "WeightSender":
    """Return a rank's sender. Rank 0 listens at `host`. Raise OrreryError if NIXL cannot load."""
    from orrery.wire.weight_wire.links import load_nixl
    from orrery.wire.weight_wire.transfer import WeightSender

    if kind == "nixl":
        load_nixl()
    folder = weight_dir(run_dir, attempt, num_nodes)
    if rank == 0:
        own(folder)
    return WeightSender(kind, folder, host, rank, num_ranks, device)


def check_library(kind: str) -> None:
    if kind == "nixl" and find_spec("nixl") is None:
        raise OrreryError(
            "transport.weights 'nixl': NIXL is not installed. "
            "Install the nixl version in locks/, or set transport.weights to 'nccl'"
        )
