"""Take part in a run's epochs and rounds through a replicated ledger and leases."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from orrery.elastic import ledger as rules
from orrery.elastic.ledger import Behind, Ledger
from orrery.elastic.types import ElasticError, Epoch, LeaseLost, OuterRound, SiteMember, Terms

log = logging.getLogger(__name__)

__all__ = ["Behind", "EpochLog", "LedgerView", "LogMembership", "Membership", "RoundPace", "Terms"]


class Membership(Protocol):
    """A site's calls to the run. They block, and raise LeaseLost if the site must rejoin."""

    def join(self, site: SiteMember, terms: Terms) -> Epoch:
        """Join the run with a new site id. Raise ElasticError if the run refuses."""

    def epoch(self) -> Epoch: ...

    def begin_round(self, number: int, tokens: int, deadline_s: float) -> OuterRound:
        """Return the round once all live members have arrived, or `grace_s` after a quorum.

        Raise Behind if the round is over, and ElasticError if no quorum is live after `deadline_s`.
        """

    def commit(self, outer_round: OuterRound, digest: str) -> bool:
        """Report the outer step's `digest`. Return whether the round is committed.

        The caller must begin an uncommitted round again.
        """

    def abort(self, outer_round: OuterRound, lost: Iterable[int]) -> OuterRound:
        """Report lost ranks (sites). Return the round, restarted without dead sites."""

    def leave(self) -> None: ...


@dataclass(frozen=True)
class LedgerView:
    ledger: Ledger
    revision: int
    live: frozenset[str]


class EpochLog(Protocol):
    """A linearizable store of the ledger and the leases."""

    def acquire(self, site_id: str) -> None:
        """Take a lease and renew it."""

    def release(self) -> None:
        """Release the lease, so that other sites see this site leave."""

    def read(self) -> LedgerView: ...

    def write(self, ledger: Ledger, view: LedgerView) -> bool:
        """Replace the ledger. Return False if it changed after `view`.

        Raise LeaseLost if the lease has ended.
        """

    def wait(self, view: LedgerView, timeout_s: float) -> LedgerView:
        """Return the next view other than `view`, or the current view after `timeout_s`."""

    def now_s(self) -> float: ...


@dataclass(frozen=True)
class RoundPace:
    founders: int = 1  # quorum of the first round
    quorum: int = 1  # quorum of later rounds
    grace_s: float = 600.0  # wait for late sites after a quorum
    suspect_s: float = 4.0  # a lost member's time to report before the round goes on without it
    exchange_s: float = 600.0  # wait for all members' reports
    max_sites: int = sys.maxsize


class LogMembership:
    def __init__(self, log: EpochLog, pace: RoundPace) -> None:
        self._log, self._pace = log, pace
        self._id = ""
        self.measured: Callable[[], Mapping[str, int]] = dict  # Mb/s by peer id

    def join(self, site: SiteMember, terms: Terms) -> Epoch:
        if site.id == self._id:
            raise ElasticError(f"site {site.id[:8]}: the id was used before; draw a new one")
        self._await_state(site, terms)
        self._log.acquire(site.id)
        self._id = site.id
        try:
            return self._change(
                lambda view: self._admitted(view, site, terms, view.live - {site.id})
            ).ledger.current
        except BaseException:
            self.leave()
            raise

    def _await_state(self, site: SiteMember, terms: Terms) -> None:
        """Wait `grace_s` for another site if no member is live and this site's state is old."""
        end_s = self._log.now_s() + self._pace.grace_s
        while True:
            view = self._log.read()
            try:
                self._admitted(view, site, terms, view.live)
                return
            except rules.StateLacking:
                if (left_s := end_s - self._log.now_s()) <= 0:
                    raise
            self._log.wait(view, left_s)

    def _admitted(
        self, view: LedgerView, site: SiteMember, terms: Terms, live: frozenset[str]
    ) -> Ledger:
        return rules.admit(view.ledger, site, terms, live, self._pace.max_sites)

    def epoch(self) -> Epoch:
        return self._log.read().ledger.current

    def begin_round(self, number: int, tokens: int, deadline_s: float) -> OuterRound:
        begin_s, since_s, num_told = self._log.now_s(), None, 0
        while True:
            view = self._change(lambda view: self._arrive(view, number, tokens))
            if (found := self._open(view, number)) is not None:
                return found
            quorum = self._quorum(view)
            num_joined = len(view.ledger.known & view.live)
            if num_joined < quorum and num_joined != num_told:
                log.info("round %d: %d of %d sites have joined", number, num_joined, quorum)
                num_told = num_joined
            now_s = self._log.now_s()
            is_over = now_s - begin_s >= deadline_s
            if not rules.has_quorum(view.ledger, view.live, quorum):
                if (
                    is_over
                    and not view.ledger.is_exchanging
                    and not rules.may_have_quorum(view.ledger, view.live, quorum)
                ):
                    num = len(view.ledger.tokens.keys() & view.live)
                    raise ElasticError(
                        f"trainer.elastic.quorum: {num} of {quorum} sites arrived in round "
                        f"{number} within {deadline_s:g} s; start more with `orrery join`"
                    )
                since_s = None
            elif since_s is None:
                since_s = now_s
            if since_s is not None and now_s - since_s >= self._pace.grace_s:
                view = self._change(lambda view: rules.start(view.ledger, view.live))
                continue
            left_s = self._pace.exchange_s if is_over else begin_s + deadline_s - now_s
            if since_s is not None:
                left_s = min(left_s, since_s + self._pace.grace_s - now_s)
            self._log.wait(view, max(left_s, 0.0))

    def commit(self, outer_round: OuterRound, digest: str) -> bool:
        self._change(lambda view: rules.acknowledge(view.ledger, self._id, outer_round, digest))
        ledger = self._settled(outer_round)
        self._check_member(ledger)
        return ledger.last >= outer_round.number

    def abort(self, outer_round: OuterRound, lost: Iterable[int]) -> OuterRound:
        peers = tuple(lost)
        self._change(lambda view: rules.report(view.ledger, self._id, outer_round, peers))
        ledger = self._settled(outer_round)
        self._check_member(ledger)
        if ledger.last >= outer_round.number:
            raise Behind(self._id, ledger.last)
        own = outer_round.weights[outer_round.epoch.rank(self._id)]
        return self.begin_round(outer_round.number, own, self._pace.exchange_s)

    def leave(self) -> None:
        if self._id:
            self._log.release()

    def _arrive(self, view: LedgerView, number: int, tokens: int) -> Ledger:
        ledger = rules.measure(view.ledger, self._id, self.measured())
        ledger = rules.settle(ledger, view.live, quorum=self._pace.quorum)
        ledger = rules.arrive(ledger, self._id, number, tokens)
        if rules.has_quorum(ledger, view.live, self._quorum(view)) and rules.is_complete(
            ledger, view.live
        ):
            ledger = rules.start(ledger, view.live)
        return ledger

    def _open(self, view: LedgerView, number: int) -> OuterRound | None:
        found = view.ledger.open_round(self._id)
        return found if found is not None and found.number == number else None

    def _quorum(self, view: LedgerView) -> int:
        return self._pace.quorum if view.ledger.committed else self._pace.founders

    def _settled(self, outer_round: OuterRound) -> Ledger:
        begin_s, accused_s = self._log.now_s(), None
        while True:
            now_s = self._log.now_s()
            has_waited = now_s - begin_s >= self._pace.exchange_s or (
                accused_s is not None and now_s - accused_s >= self._pace.suspect_s
            )
            view = self._change(partial(self._settle, outer_round, has_waited))
            if not _is_open(view.ledger, outer_round):
                return view.ledger
            silent = (view.ledger.ids & view.live) - view.ledger.reported
            accused = {each for peers in view.ledger.broken.values() for each in peers}
            if not silent <= accused:
                accused_s = None
            elif accused_s is None:
                accused_s = now_s
            left_s = begin_s + self._pace.exchange_s - now_s
            if accused_s is not None:
                left_s = min(left_s, accused_s + self._pace.suspect_s - now_s)
            self._log.wait(view, max(left_s, 0.0))

    def _settle(self, outer_round: OuterRound, has_waited: bool, view: LedgerView) -> Ledger:
        if not _is_open(view.ledger, outer_round):
            return view.ledger
        return rules.settle(view.ledger, view.live, has_waited, self._pace.quorum)

    def _check_member(self, ledger: Ledger) -> None:
        if self._id not in ledger.ids:
            raise LeaseLost(f"site {self._id[:8]} is not in epoch {ledger.epoch}")

    def _change(self, transition: Callable[[LedgerView], Ledger]) -> LedgerView:
        """Apply `transition` to the ledger until it has no effect. Return the last view."""
        while True:
            view = self._log.read()
            if self._id and self._id not in view.live:
                raise LeaseLost(f"site {self._id[:8]} has lost its lease")
            after = transition(view)
            if after == view.ledger:
                return view
            self._log.write(after, view)


def _is_open(ledger: Ledger, outer_round: OuterRound) -> bool:
    current = ledger.is_exchanging, ledger.number, ledger.epoch
    return current == (True, outer_round.number, outer_round.epoch.number)
