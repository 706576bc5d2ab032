"""Weight wires: new policy versions from the trainer to the engines. One file a kind, both ends in it.

The protocol, whatever the kind:

- `publish(version, named_tensors)` makes a version visible at once or not at all; versions only rise.
- `latest()` says the newest visible version, without torch, without waiting.
- `read_weights(path)` gives the tensors, one at a time; a version that the publisher has removed is an `OrreryError`.
- The publisher keeps the newest `keep` versions: as many as can be made while engines load one.
- Every tensor has a fingerprint, taken from the trainer's own memory before it is written.
"""

from collections.abc import Callable
from pathlib import Path

from orrery.manifest.errors import OrreryError
from orrery.transport.weight_wire.contract import Published
from orrery.transport.weight_wire.files import WeightPublisher, WeightWatch, read_weights, remove_weight_dir, weight_dir

__all__ = [
    "KINDS",
    "Published",
    "WeightPublisher",
    "WeightWatch",
    "make_publisher",
    "make_watch",
    "read_weights",
    "remove_weight_dir",
    "weight_dir",
]

KINDS: dict[str, tuple[Callable[[Path, int], WeightPublisher], Callable[[Path], WeightWatch]]] = {"files": (WeightPublisher, WeightWatch)}


def _kind(kind: str) -> tuple[Callable[[Path, int], WeightPublisher], Callable[[Path], WeightWatch]]:
    if kind not in KINDS:
        raise OrreryError(f"transport.weights: {kind!r} is not a weight wire; choose from {', '.join(KINDS)}")
    return KINDS[kind]


def make_publisher(kind: str, run_dir: Path, attempt: int, num_nodes: int, keep: int) -> WeightPublisher:
    """The trainer's end (rank 0) in a stage on `num_nodes`; the newest `keep` versions stay readable."""
    return _kind(kind)[0](weight_dir(run_dir, attempt, num_nodes), keep)


def make_watch(kind: str, run_dir: Path, attempt: int, num_nodes: int) -> WeightWatch:
    """The orchestrator's end; the engines read what it hands them."""
    return _kind(kind)[1](weight_dir(run_dir, attempt, num_nodes))
