"""Who may have which version of a direct wire, as files: the orchestrator's end, which needs no torch.

The trainer's ranks send from the weights that they train, so a version exists only until the next optimizer step:

- `version_<n>.json` says that n can be had. It is made when n is, and taken away just before the step that makes n + 1.
- Whoever brings engines to n first makes `claim_<n>_<take>.json`, a hard link to the marker: that works while the marker is there and
  not after, atomically. So either the trainer sees the claim before it steps, and waits until the take is over; or there is none, and n
  is gone.
- `take_<take>.json` says which engines are to have which version. It is what engines are handed as the path of a version.
- A take that is over, however it ended, or that will not come about is given back (`release`), and the trainer goes on.

Versions of other wires can always be claimed: nothing happens.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orrery.manifest.publish import write_atomic
from orrery.transport.weight_wire.contract import Published

ADDRESS = "wire.json"  # stands in the folder of every direct wire, and in no other


class Taking(msgspec.Struct, frozen=True):
    """`take_<take>.json`."""

    take: int
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
    folder = published.folder
    take = 1 + max((_number(path, 1) for path in folder.glob("take_*.json")), default=0)
    path = folder / f"take_{take}.json"
    write_atomic(path, msgspec.json.encode(Taking(take, published.version, tuple(engines))))
    try:
        os.link(folder / f"version_{published.version}.json", folder / f"claim_{published.version}_{take}.json")
    except FileNotFoundError:
        return None
    return msgspec.structs.replace(published, path=str(path))


def release(claimed: Published) -> None:
    """The take of `claimed` is over, or will not be."""
    path = claimed.folder
    if path.name.startswith("take_"):
        (path.parent / f"claim_{claimed.version}_{_number(path, 1)}.json").unlink(missing_ok=True)


def read_taking(path: Path | str) -> Taking | None:
    """What stands at the path that an engine was handed; None where this is no path of a direct wire."""
    path = Path(path)
    return msgspec.json.decode(path.read_bytes(), type=Taking) if path.name.startswith("take_") else None


def claims(folder: Path, version: int) -> list[int]:
    """The takes of `version` that are not over."""
    return sorted(_number(path, 2) for path in folder.glob(f"claim_{version}_*.json"))


def _number(path: Path, part: int) -> int:
    return int(path.stem.split("_")[part])
