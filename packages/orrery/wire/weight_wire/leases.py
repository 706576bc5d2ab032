"""Published versions, and the leases and transfers of a direct wire. Needs no torch.

The trainer sends the weights in training, so a version exists only until the next optimizer step.
Files in the wire's folder coordinate orchestrator and trainer:

- `version_<n>.json`: version n is available. The trainer removes it before its next step.
- `claim_<n>_<lease>.json`: a lease, hard-linked to the file above. Linking is atomic: either the
  trainer sees the lease and waits, or the version is gone.
- `take_<transfer>_<lease>.json`: one transfer's engines, given to them as the version's path.
  Removing the file ends the transfer.

If an engine is lost, its transfer is abandoned. The lease holds the version for a retry without
it.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orrery.manifest.errors import RunFailed
from orrery.manifest.publish import write_atomic
from orrery.wire import nfs

ADDRESS = "wire.json"  # only in a direct wire's folder
# A worker passes on only its error message, so the message carries these words.
ELSEWHERE = "failed elsewhere"
GONE = "can no longer be had"
ROUND_S = 60.0  # for one round of messages, scaled

_numbers = itertools.count(1)  # of leases and transfers, made by one process


class WireFailed(RunFailed):
    """A failed transfer of weights. The message names the transfer, the peer or the tensor."""


class TransferFailed(WireFailed):
    """A transfer that another process made fail. A retry without it may succeed."""

    def __init__(self, transfer: int, why: object) -> None:
        super().__init__(f"take {transfer} {ELSEWHERE}: {why}")


class Published(msgspec.Struct, frozen=True):
    """A readable policy version.

    - `fingerprints`: by Hugging Face tensor name. `digest` is their hash.
    - `canary`: the trainer's log-probs of the canary's tokens after the first. Empty if the
      publisher is not a trainer.
    """

    version: int
    path: str
    fingerprints: dict[str, int]
    digest: str
    canary: tuple[float, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(self.path)


class Transfer(msgspec.Struct, frozen=True):
    """`take_<transfer>_<lease>.json`: one version going to these engines."""

    number: int = msgspec.field(name="take")
    lease: int = msgspec.field(name="claim")
    version: int
    engines: tuple[str, ...]


def is_direct(published: Published) -> bool:
    """Return whether the version comes from its running trainer only."""
    return (published.folder / ADDRESS).exists()


def acquire_lease(published: Published, engines: Sequence[str]) -> Published | None:
    """Lease the version and start a transfer to the named engines.

    Return the version for engines to load, or None if it is gone. Versions of other wires are
    returned unchanged. Only one process may call this. It must call `release_lease`, also after a
    failure.
    """
    if not is_direct(published):
        return published
    folder, number = published.folder, next(_numbers)
    transfer = Transfer(number, number, published.version, tuple(engines))
    leased = _start(published, folder, transfer)
    try:
        marker = folder / f"version_{published.version}.json"
        os.link(marker, _lease_path(folder, published.version, number))
    except FileNotFoundError:
        abandon_transfer(leased.folder)
        return None
    return leased


def retry_transfer(leased: Published, engines: Sequence[str]) -> Published:
    """Abandon the transfer and start another to `engines`, under the same lease."""
    path = leased.folder
    if not _is_transfer(path):
        return leased
    abandon_transfer(path)
    number, lease = next(_numbers), _number(path, 2)
    return _start(leased, path.parent, Transfer(number, lease, leased.version, tuple(engines)))


def abandon_transfer(path: Path) -> None:
    """End all waits of the transfer at `path`, if it is one."""
    if _is_transfer(path):
        path.unlink(missing_ok=True)


def release_lease(leased: Published) -> None:
    """End the lease and its transfer, so that the trainer may step."""
    path = leased.folder
    if _is_transfer(path):
        abandon_transfer(path)
        _lease_path(path.parent, leased.version, _number(path, 2)).unlink(missing_ok=True)


def read_transfer(path: Path | str) -> Transfer | None:
    """Return the transfer at an engine's path, or None for other wires' paths.

    Raises TransferFailed if the transfer is over.
    """
    path = Path(path)
    if not _is_transfer(path):
        return None
    content = nfs.read(path)
    if content is None:
        raise TransferFailed(_number(path, 1), "it was given up")
    return msgspec.json.decode(content, type=Transfer)


def transfer_path(folder: Path, transfer: int, lease: int) -> Path:
    return folder / f"take_{transfer}_{lease}.json"


def open_leases(folder: Path, version: int) -> list[int]:
    """Return the version's open leases."""
    return sorted(_number(path, 2) for path in folder.glob(f"claim_{version}_*.json"))


def is_leased(folder: Path, version: int, lease: int) -> bool:
    """Return whether this lease is open. Looks it up by name, since NFS may list it late."""
    return _lease_path(folder, version, lease).exists()


def _start(published: Published, folder: Path, transfer: Transfer) -> Published:
    path = transfer_path(folder, transfer.number, transfer.lease)
    write_atomic(path, msgspec.json.encode(transfer))
    return msgspec.structs.replace(published, path=str(path))


def _lease_path(folder: Path, version: int, lease: int) -> Path:
    return folder / f"claim_{version}_{lease}.json"


def _is_transfer(path: Path) -> bool:
    return path.name.startswith("take_")


def _number(path: Path, part: int) -> int:
    return int(path.stem.split("_")[part])
