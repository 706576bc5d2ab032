"""Define the values that `membership`, `exchange` and `loop` share.

- A site is one trainer with any number of processes. Its rank is its index in the epoch.
- An epoch is a numbered set of sites. A round is one exchange between them.
- A site's weight is its tokens or steps since its last exchange.
"""

from pathlib import Path

import msgspec

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import write_atomic
from orrery.runtime.run_directory import SITE_FILE


class ElasticError(OrreryError):
    """A site cannot join or continue the run."""


class LeaseLost(Exception):
    """This site left the epoch or lost its lease."""


class LinkBroken(Exception):
    """A peer failed during an exchange."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


class SiteMember(msgspec.Struct, frozen=True, order=True):
    id: str  # 32 hexadecimal digits, drawn when the site starts
    address: str
    port: int  # 0 if the site accepts no connections
    shard: int | None = None  # data shard, if the operator chose one


class Epoch(msgspec.Struct, frozen=True):
    number: int
    members: tuple[SiteMember, ...]
    speeds: tuple[tuple[int, ...], ...] = ()  # [a][b]: Mb/s from rank a to b (0 if unmeasured)

    def rank(self, site_id: str) -> int:
        """Return the site's rank. Raise LeaseLost if it is not a member."""
        for rank, member in enumerate(self.members):
            if member.id == site_id:
                return rank
        raise LeaseLost(f"site {site_id[:8]} is not in epoch {self.number}")


class OuterRound(msgspec.Struct, frozen=True):
    """One exchange. `weights`: sites' weights by rank."""

    number: int
    epoch: Epoch
    weights: tuple[int, ...]


class SitePlace(msgspec.Struct, frozen=True):
    """This site's settings.

    `listen`: own ADDRESS:PORT, or "" for no listener. `join`: ADDRESS:PORT of any site. The first
    site joins itself.
    """

    listen: str
    join: str
    certificates: str
    name: str
    shard: int | None = None
    rewinds: bool = False


def read_place(run_dir: Path) -> SitePlace:
    path = run_dir / SITE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=SitePlace)
    except (OSError, msgspec.MsgspecError) as error:
        raise ElasticError(
            f"{path}: cannot be read ({error}), and a run of several sites needs it; start the "
            f"stage with `orrery join RUN ADDRESS:PORT`"
        ) from error


def end_rewind(run_dir: Path, place: SitePlace) -> None:
    """Write `rewinds: false` into the site's file, because a rewind is for one start."""
    if place.rewinds:
        ended = msgspec.structs.replace(place, rewinds=False)
        write_atomic(run_dir / SITE_FILE, msgspec.json.encode(ended))
