"""Who may have which version of a direct wire, as files: the orchestrator's end, which needs no torch.

The trainer's ranks send from the weights that they train, so a version exists only until the next optimizer step:

- `version_<n>.json` says that n can be had. It is made when n is, and taken away just before the step that makes n + 1.
- Whoever brings engines to n first makes `claim_<n>_<claim>.json`, a hard link to the marker: that works while the marker is there and
  not after, atomically. So either the trainer sees the claim before it steps, and waits until what was claimed is sent or the claim is
  given back; or there is none, and n is gone.
- `take_<take>_<claim>.json` says which engines are to have which version, together. It is what engines are handed as the path of a version.
- A take is on while its file is there. Where an engine is lost, or a rank of one cannot take part, the file goes (`give_up`), so that
  nobody waits for it any more; the claim holds the version meanwhile, and the others make another take of it (`claim_again`).
- A claim is given back (`release`), however its takes ended, and the trainer goes on. Trainer ranks answer no take without its claim.

Versions of other wires can always be claimed: nothing happens.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orrery.manifest.publish import write_atomic
from orrery.transport import nfs
from orrery.transport.weight_wire.contract import Published, TakeFailed

ADDRESS = "wire.json"  # stands in the folder of every direct wire, and in no other

_numbers = itertools.count(1)  # of takes; one process claims, and no number means two of them


class Taking(msgspec.Struct, frozen=True):
    """`take_<take>_<claim>.json`."""

    take: int
    claim: int
    version: int
    engines: tuple[str, ...]


def is_direct(published: Published) -> bool:
    """Whether engines can have this only together with its trainer."""
    return (published.folder / ADDRESS).exists()


def claim(published: Published, engines: Sequence[str]) -> Published | None:
    """`published` as the engines of these names are to be handed it, all of them; None where it is gone: look for a newer one.

    One process claims. `release` what this gave when the update is over, whether it failed or not.
    """
    if not is_direct(published):
        return published
    folder, number = published.folder, next(_numbers)
    claimed = _take(published, folder, Taking(number, number, published.version, tuple(engines)))
    try:
        os.link(
            folder / f"version_{published.version}.json",
            _claim_path(folder, published.version, number),
        )
    except FileNotFoundError:
        give_up(claimed.folder)
        return None
    return claimed


def claim_again(claimed: Published, engines: Sequence[str]) -> Published:
    """What is claimed already once more, for these engines; the take before is given up."""
    if not _is_take(claimed.folder):
        return claimed
    path = claimed.folder
    give_up(path)
    return _take(
        claimed,
        path.parent,
        Taking(next(_numbers), _number(path, 2), claimed.version, tuple(engines)),
    )


def give_up(taken: Path) -> None:
    """Nobody is to wait any more for who has not come through the take that stands at this path, if it is one."""
    if _is_take(taken):
        taken.unlink(missing_ok=True)


def release(claimed: Published) -> None:
    """The claim is over."""
    path = claimed.folder
    if _is_take(path):
        give_up(path)
        _claim_path(path.parent, claimed.version, _number(path, 2)).unlink(missing_ok=True)


def read_taking(path: Path | str) -> Taking | None:
    """What stands at the path that an engine was handed; None where this is no path of a direct wire. TakeFailed where the take is over."""
    path = Path(path)
    if not _is_take(path):
        return None
    content = nfs.read(path)
    if content is None:
        raise TakeFailed(_number(path, 1), "it was given up")
    return msgspec.json.decode(content, type=Taking)


def take_path(folder: Path, take: int, claim: int) -> Path:
    return folder / f"take_{take}_{claim}.json"


def claims(folder: Path, version: int) -> list[int]:
    """The claims of `version` that have not been given back."""
    return sorted(_number(path, 2) for path in folder.glob(f"claim_{version}_*.json"))


def is_claimed(folder: Path, version: int, number: int) -> bool:
    """Whether this claim of `version` has not been given back."""
    return _claim_path(
        folder, version, number
    ).exists()  # by name: a network file system may list it later


def _take(published: Published, folder: Path, taking: Taking) -> Published:
    path = take_path(folder, taking.take, taking.claim)
    write_atomic(path, msgspec.json.encode(taking))
    return msgspec.structs.replace(published, path=str(path))


def _claim_path(folder: Path, version: int, number: int) -> Path:
    return folder / f"claim_{version}_{number}.json"


def _is_take(path: Path) -> bool:
    return path.name.startswith("take_")


def _number(path: Path, part: int) -> int:
    return int(path.stem.split("_")[part])
