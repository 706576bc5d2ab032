"""Define the values and errors that the other modules share.

- A site is one trainer with any number of processes. A site's rank is its index in the epoch. A
  process's rank is its index in the site.
- An epoch is a numbered period with fixed sites. A round is one exchange between them.
- A site's weight is its tokens or steps since its last exchange.
"""

from pathlib import Path

import msgspec

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import write_atomic
from orrery.runtime.run_directory import SITE_FILE

PROTOCOL = 2  # increment if the format of frames or ledger changes
NO_ROUND = -1  # before round 0


class ElasticError(OrreryError):
    """A site cannot join or continue the run."""


class LeaseLost(Exception):
    """This site left the epoch or lost its lease."""


class LinkBroken(Exception):
    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


class SiteMember(msgspec.Struct, frozen=True, order=True):
    id: str  # 32 random hexadecimal digits
    address: str
    port: int  # 0 without a listener
    shard: int | None = None  # the operator's choice of data shard
    name: str = ""  # in the site's certificate


class Epoch(msgspec.Struct, frozen=True):
    number: int
    members: tuple[SiteMember, ...]
    speeds: tuple[tuple[int, ...], ...] = ()  # [a][b]: Mb/s from rank a to b (0 if unmeasured)

    def rank(self, site_id: str) -> int:
        """Raise LeaseLost if the site is not a member."""
        for rank, member in enumerate(self.members):
            if member.id == site_id:
                return rank
        raise LeaseLost(f"site {site_id[:8]} is not in epoch {self.number}")


class OuterRound(msgspec.Struct, frozen=True):
    """A round's exchange. `weights[r]`: weight of rank r."""

    number: int
    epoch: Epoch
    weights: tuple[int, ...]


class Terms(msgspec.Struct, frozen=True):
    """A site's versions, codecs, memory and state, or the run's requirements."""

    manifest: str
    code: str
    codec: str
    memory_bytes: int  # free host memory, or the run's minimum
    protocol: int = PROTOCOL
    codecs: tuple[str, ...] = ()
    round: int = NO_ROUND  # last round in this site's state
    digest: str = ""  # state digest after `round`
    rewinds: bool = False  # set the run back to `round` if no site is live


def check_terms(run: Terms, site: Terms) -> None:
    codecs = site.codecs or (site.codec,)
    for is_wrong, sentence in (
        (
            site.protocol != run.protocol,
            f"protocol: this site speaks version {site.protocol}, the run version {run.protocol}; "
            "install the run's release of Orrery",
        ),
        (
            site.manifest != run.manifest,
            f"manifest: this site has {site.manifest[:12]}, the run {run.manifest[:12]}; copy the "
            "run's manifest and join with it",
        ),
        (
            site.code != run.code,
            f"code: this site has version {site.code[:12]}, the run {run.code[:12]}; check out the "
            "run's commit",
        ),
        (
            run.codec not in codecs,
            f"trainer.elastic.codec: the run uses {run.codec}, and this site knows "
            f"{', '.join(codecs)}; install the run's release of Orrery",
        ),
        (
            site.memory_bytes < run.memory_bytes,
            f"memory: this site has {site.memory_bytes / 1e9:.1f} GB of host memory free, and the "
            f"outer loop needs {run.memory_bytes / 1e9:.1f} GB; free some or use a larger host",
        ),
    ):
        if is_wrong:
            raise ElasticError(sentence)


class SitePlace(msgspec.Struct, frozen=True):
    """A site's addresses. `listen`: own ADDRESS:PORT, or "". `join`: ADDRESS:PORT of any site.

    The first site joins itself.
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
    """Write `rewinds: false` into the site's file, so that only one start rewinds."""
    if place.rewinds:
        ended = msgspec.structs.replace(place, rewinds=False)
        write_atomic(run_dir / SITE_FILE, msgspec.json.encode(ended))
