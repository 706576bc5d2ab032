"""Run a membership from a script instead of leases and clocks.

- Sites are threads of one process, and a `SharedLedger` is their log. Time passes in `advance`.
- Events name a site by its index, a round and a moment, so that a trace repeats to the bit.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from orrery.elastic.ledger import Ledger
from orrery.elastic.membership import LedgerView, LogMembership, RoundPace
from orrery.elastic.types import LeaseLost, OuterRound


class SiteCrashed(Exception):
    """End the thread of a site that the script has killed."""


@dataclass(frozen=True)
class ScriptedEvent:
    """`crash` raises SiteCrashed in the site, `pause` takes its lease.

    The moment is before it arrives, after the round began, or before it commits.
    """

    kind: Literal["crash", "pause"]
    site: int
    round: int
    moment: Literal["arrive", "exchange", "commit"]


class SharedLedger:
    """The log of a scripted run."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.view = LedgerView(Ledger(), 0, frozenset())
        self.time_s = 0.0
        self.cut_off: frozenset[str] = frozenset()

    def advance(self, seconds: float) -> None:
        with self.changed:
            self.time_s += seconds
            self.changed.notify_all()

    def cut(self, site_ids: Iterable[str]) -> None:
        """Take the leases of sites and block their calls until `heal`."""
        with self.changed:
            self.cut_off |= frozenset(site_ids)
            self.set_live(self.view.live - self.cut_off)

    def heal(self) -> None:
        with self.changed:
            self.cut_off = frozenset()
            self.changed.notify_all()

    def set_live(self, live: Iterable[str]) -> None:
        with self.changed:
            self.view = LedgerView(self.view.ledger, self.view.revision, frozenset(live))
            self.changed.notify_all()


class ScriptedLog:
    """One site's access to a `SharedLedger`."""

    def __init__(self, shared: SharedLedger) -> None:
        self.shared = shared
        self.site_id = ""

    def acquire(self, site_id: str) -> None:
        self.release()
        self.site_id = site_id
        self.shared.set_live(self._reached() | {site_id})

    def release(self) -> None:
        self.shared.set_live(self.shared.view.live - {self.site_id})

    def read(self) -> LedgerView:
        with self.shared.changed:
            self._reached()
            return self.shared.view

    def write(self, ledger: Ledger, view: LedgerView) -> bool:
        with self.shared.changed:
            if self.site_id not in self._reached():
                raise LeaseLost(f"site {self.site_id[:8]} has lost its lease")
            if self.shared.view.revision != view.revision:
                return False
            self.shared.view = LedgerView(ledger, view.revision + 1, self.shared.view.live)
            self.shared.changed.notify_all()
            return True

    def wait(self, view: LedgerView, timeout_s: float) -> LedgerView:
        with self.shared.changed:
            end_s = self.shared.time_s + timeout_s
            self.shared.changed.wait_for(
                lambda: self.shared.view != view or self.shared.time_s >= end_s
            )
            return self.shared.view

    def now_s(self) -> float:
        return self.shared.time_s

    def _reached(self) -> frozenset[str]:
        """Wait until the site is not cut off, and return the live sites."""
        with self.shared.changed:
            self.shared.changed.wait_for(lambda: self.site_id not in self.shared.cut_off)
            return self.shared.view.live


class ScriptedMembership(LogMembership):
    """The membership of site number `index`, with the events of `trace`."""

    def __init__(
        self,
        shared: SharedLedger,
        index: int = 0,
        trace: Sequence[ScriptedEvent] = (),
        pace: RoundPace = RoundPace(),  # noqa: B008 (frozen)
    ) -> None:
        self._scripted = ScriptedLog(shared)
        super().__init__(self._scripted, pace)
        self._due = [event for event in trace if event.site == index]

    def begin_round(self, number: int, tokens: int, deadline_s: float) -> OuterRound:
        self._play(number, "arrive")
        outer_round = super().begin_round(number, tokens, deadline_s)
        self._play(number, "exchange")
        return outer_round

    def commit(self, outer_round: OuterRound, digest: str) -> bool:
        self._play(outer_round.number, "commit")
        return super().commit(outer_round, digest)

    def _play(self, number: int, moment: str) -> None:
        for event in [e for e in self._due if (e.round, e.moment) == (number, moment)]:
            self._due.remove(event)
            self._scripted.release()
            if event.kind == "crash":
                raise SiteCrashed(f"round {number}, before {moment}")
            raise LeaseLost(f"the script's {event.kind} of round {number}, {moment}")
