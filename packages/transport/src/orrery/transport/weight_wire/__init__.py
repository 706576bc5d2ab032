"""Weight wires: new policy versions from the trainer to the engines.

What every wire has:

- A version becomes visible at once or not at all, as a marker file; versions only rise. `make_watch(…).latest()` says the newest, without
  torch, without waiting.
- Every tensor has a fingerprint, taken from the trainer's own memory before it leaves.
- `acquire_lease(published, engines)` before engines are brought to a version, `release` afterwards. What `claim` gives is what engines load.

Kind `files`: rank 0 gathers and writes whole tensors, `read_weights(path)` gives them one at a time. The publisher keeps the newest `keep`
versions; a version that it has removed is an `OrreryError`.

Kind `adapters`: the same files with nothing in them but the adapters of `trainer.lora`, under PEFT's names, the scale in B. In RL engines
serve them as a model of its own, beside the weights that they started with.

Direct kinds (`nccl`, `nixl`): nothing is gathered and nothing written. `slices` says, as data, who sends what to whom; `needs` of the
engines' room learns what an engine rank needs. Of vLLM's own engines `nccl` and `ipc` send whole tensors to every rank, `nccl_m2n` does so
for what is fused, and `sharded_rdt` wants Ray; so the transport here is ours, and loading is vLLM's.

- A version can be had while the trainer holds it: from `publish` until the next optimizer step. `claim` is None once it is gone.
- All engines named in a take must come (each is sent `/update_weights` with what `claim` gave); each rank arrives in the trainer's store,
  and once all have, they go as one group (`meeting`, `reception`). Whoever takes part is the group: there is nothing else to be told, and a
  group is formed anew only when its members are others than before, or after a failure.

Engines that are lost, and come back:

    acquire_lease(version, [0, 1]) ─▶ take 7 of both ──1 is lost──▶ give_up ─▶ 0 fails: TransferFailed ─▶ retry_transfer(…, [0]) ─▶ take 8 of 0 ─▶ release
    1 listens again ─▶ acquire_lease(the version of now, [1]) ─▶ take 9 of 1 ─▶ release; the next version is taken by both together

- Who is lost says so by not answering, or fails with words of its own; everybody else fails with `TransferFailed` and is well. `give_up` spares
  them the deadlines for the one that does not come: waits for it end, and where connections break they have ended before.
- An engine of several ranks has taken a version when each of them has. One that fails says so to its neighbours, which wait for what it
  received before they attest; still some may think that all is well, so the engine's client asks every rank, and then has all give it up.
- The claim holds the version until the trainer has sent all of it in one take. SliceSpec that take failed elsewhere and the trainer has stepped
  since, another says that the version can no longer be had, and the next one will do. An engine half-way through a failed take holds
  nobody's weights; it stays paused until another take, of this version or a later one, has succeeded.
- One that comes back claims what is there. SliceSpec `claim` says that the version is gone, the next one will do.
- A take that begins late, after its claim was given back, is refused by the trainer's ranks, which are the only ones to send.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest
from orrery.transport.weight_wire.files import (
    WeightPublisher,
    WeightWatch,
    check_room,
    own,
    read_weights,
    remove_weight_dir,
    weight_dir,
)
from orrery.transport.weight_wire.leases import (
    Published,
    TransferFailed,
    WireFailed,
    abandon_transfer,
    acquire_lease,
    is_direct,
    release_lease,
    retry_transfer,
)

if TYPE_CHECKING:
    import torch

    from orrery.transport.weight_wire.sender import WeightSender

__all__ = [
    "ADAPTER",
    "DIRECT_KINDS",
    "KINDS",
    "Published",
    "TransferFailed",
    "WeightPublisher",
    "WeightWatch",
    "WireFailed",
    "check_library",
    "check_room",
    "acquire_lease",
    "retry_transfer",
    "abandon_transfer",
    "is_direct",
    "make_publisher",
    "make_weight_sender",
    "make_watch",
    "read_weights",
    "release_lease",
    "remove_weight_dir",
    "served_model",
    "weight_dir",
]

KINDS: dict[str, Callable[[Path, int], WeightPublisher]] = {
    "files": WeightPublisher,
    "adapters": WeightPublisher,
}
DIRECT_KINDS = ("nccl", "nixl")
ADAPTER = "adapter"


def served_model(manifest: Manifest, stage: str) -> str | None:
    """What the requests of `stage` are for: ADAPTER, or None where engines have weights alone, as when they judge what RL has made."""
    return ADAPTER if manifest.transport.weights == "adapters" and stage == "rl" else None


def make_publisher(
    kind: str, run_dir: Path, attempt: int, num_nodes: int, keep: int
) -> WeightPublisher:
    """The trainer's end (rank 0) in a stage on `num_nodes`; the newest `keep` versions stay readable."""
    _check(kind, tuple(KINDS))
    return KINDS[kind](weight_dir(run_dir, attempt, num_nodes), keep)


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
    """The trainer's end of a direct wire, one on each rank; `host` is where rank 0 may listen.

    Raises OrreryError where what the wire needs cannot be loaded here.
    """
    from orrery.transport.weight_wire import nixl
    from orrery.transport.weight_wire.sender import WeightSender

    _check(kind, DIRECT_KINDS)
    if kind == "nixl":
        nixl.load()
    folder = weight_dir(run_dir, attempt, num_nodes)
    if rank == 0:
        own(folder)
    return WeightSender(kind, folder, host, rank, num_ranks, device)


def check_library(kind: str) -> None:
    """For an engine, as it starts: raises OrreryError where the package that this kind needs is not installed here.

    Nothing is loaded: vLLM sets what NIXL reads before it loads it.
    """
    if kind == "nixl" and find_spec("nixl") is None:
        raise OrreryError(
            "transport.weights 'nixl': NIXL is not installed here; install nixl as locks/ has it, or set it to 'nccl'"
        )


def make_watch(kind: str, run_dir: Path, attempt: int, num_nodes: int) -> WeightWatch:
    """The orchestrator's end, of any kind; the engines read what it hands them."""
    _check(kind, (*KINDS, *DIRECT_KINDS))
    return WeightWatch(weight_dir(run_dir, attempt, num_nodes))


def _check(kind: str, kinds: tuple[str, ...]) -> None:
    if kind not in kinds:
        raise OrreryError(
            f"transport.weights: {kind!r} is not a weight wire here; choose from {', '.join(kinds)}"
        )
