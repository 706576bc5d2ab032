"""What every weight wire says of a version; `weight_wire/__init__.py` has the protocol in words."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orrery.manifest.errors import RunFailed
from orrery.manifest.publish import write_atomic
from orrery.transport import nfs


class WireFailed(RunFailed):
    """Weights did not travel; the sentence names the take, who was waited for, or the tensor."""


ELSEWHERE = "failed elsewhere"
GONE = "can no longer be had"  # of a version: the trainer has sent it, and stepped since
ROUND_S = (
    60.0  # for one round; a bucket takes milliseconds, the rest is patience with a busy machine
)


class TransferFailed(WireFailed):
    """A take came to nothing for this end by another's doing: the same again, without whoever was lost, may succeed.

    A worker of an engine passes on nothing but its sentence, so the sentence says so too (`ELSEWHERE`).
    """

    def __init__(self, take: int, why: object) -> None:
        super().__init__(f"take {take} {ELSEWHERE}: {why}")


class Published(msgspec.Struct, frozen=True):
    """A readable policy version.

    - `fingerprints`: by Hugging Face tensor name. `digest` is the hash of all of them.
    - `canary`: the trainer's log-probs of the canary's tokens after the first. It is empty if the
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


ADDRESS = "wire.json"  # stands in the folder of every direct wire, and in no other

_numbers = itertools.count(1)  # of takes; one process claims, and no number means two of them


class Transfer(msgspec.Struct, frozen=True):
    """`take_<take>_<claim>.json`."""

    take: int
    claim: int
    version: int
    engines: tuple[str, ...]


def is_direct(published: Published) -> bool:
    """Whether engines can have this only together with its trainer."""
    return (published.folder / ADDRESS).exists()


def acquire_lease(published: Published, engines: Sequence[str]) -> Published | None:
    """`published` as the engines of these names are to be handed it, all of them; None where it is gone: look for a newer one.

    One process claims. `release` what this gave when the update is over, whether it failed or not.
    """
    if not is_direct(published):
        return published
    folder, number = published.folder, next(_numbers)
    claimed = _take(published, folder, Transfer(number, number, published.version, tuple(engines)))
    try:
        os.link(
            folder / f"version_{published.version}.json",
            _claim_path(folder, published.version, number),
        )
    except FileNotFoundError:
        abandon_transfer(claimed.folder)
        return None
    return claimed


def retry_transfer(claimed: Published, engines: Sequence[str]) -> Published:
    """What is claimed already once more, for these engines; the take before is given up."""
    if not _is_take(claimed.folder):
        return claimed
    path = claimed.folder
    abandon_transfer(path)
    return _take(
        claimed,
        path.parent,
        Transfer(next(_numbers), _number(path, 2), claimed.version, tuple(engines)),
    )


def abandon_transfer(taken: Path) -> None:
    """Nobody is to wait any more for who has not come through the take that stands at this path, if it is one."""
    if _is_take(taken):
        taken.unlink(missing_ok=True)


def release_lease(claimed: Published) -> None:
    """The claim is over."""
    path = claimed.folder
    if _is_take(path):
        abandon_transfer(path)
        _claim_path(path.parent, claimed.version, _number(path, 2)).unlink(missing_ok=True)


def read_transfer(path: Path | str) -> Transfer | None:
    """What stands at the path that an engine was handed; None where this is no path of a direct wire. TransferFailed where the take is over."""
    path = Path(path)
    if not _is_take(path):
        return None
    content = nfs.read(path)
    if content is None:
        raise TransferFailed(_number(path, 1), "it was given up")
    return msgspec.json.decode(content, type=Transfer)


def transfer_path(folder: Path, take: int, claim: int) -> Path:
    return folder / f"take_{take}_{claim}.json"


def open_leases(folder: Path, version: int) -> list[int]:
    """The claims of `version` that have not been given back."""
    return sorted(_number(path, 2) for path in folder.glob(f"claim_{version}_*.json"))


def is_leased(folder: Path, version: int, number: int) -> bool:
    """Whether this claim of `version` has not been given back."""
    return _claim_path(
        folder, version, number
    ).exists()  # by name: a network file system may list it later


def _take(published: Published, folder: Path, taking: Transfer) -> Published:
    path = transfer_path(folder, taking.take, taking.claim)
    write_atomic(path, msgspec.json.encode(taking))
    return msgspec.structs.replace(published, path=str(path))


def _claim_path(folder: Path, version: int, number: int) -> Path:
    return folder / f"claim_{version}_{number}.json"


def _is_take(path: Path) -> bool:
    return path.name.startswith("take_")


def _number(path: Path, part: int) -> int:
    return int(path.stem.split("_")[part])
