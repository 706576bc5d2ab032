"""Refuse a site whose terms, such as versions and free memory, do not fit the run."""

import time

import msgspec

from orrery.elastic.types import ElasticError

PROTOCOL = 2  # increment if frames or the ledger change format
NO_ROUND = -1  # before round 0


class Terms(msgspec.Struct, frozen=True):
    """A site's versions, codecs, memory and state, or a run's requirements."""

    manifest: str
    code: str
    codec: str
    memory_bytes: int  # a site's free host memory, or the run's minimum
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


def check_clock(not_before_s: float, not_after_s: float) -> None:
    """Raise ElasticError if this host's clock is outside the certificate's validity."""
    now_s = time.time()
    if not_before_s <= now_s <= not_after_s:
        return
    now, first, last = (
        time.strftime("%Y-%m-%d %H:%M", time.gmtime(t)) for t in (now_s, not_before_s, not_after_s)
    )
    raise ElasticError(
        f"clock: this host says {now} UTC, and the run's certificate is valid from {first} to "
        f"{last}; set the clock (`date -u` shows it), or ask for a new certificate"
    )
