"""Sites of a scripted run for the tests: ids, terms, and calls in threads without sleeps."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

from scripted import ScriptedEvent, ScriptedMembership, SharedLedger

from orrery.elastic.ledger import Ledger
from orrery.elastic.membership import RoundPace
from orrery.elastic.types import OuterRound, SiteMember, Terms

TERMS = Terms(manifest="m" * 64, code="c" * 40, codec="int8_block", memory_bytes=1 << 30)
HOUR_S = 3600.0


def member(index: int, life: int = 0) -> SiteMember:
    return SiteMember(f"{index:016x}{life:016x}", f"10.0.0.{index + 1}", 7000)


class ScriptedSites:
    """Sites that joined before round 1, each with a thread for its blocking calls."""

    def __init__(
        self, count: int, pace: RoundPace | None = None, trace: Sequence[ScriptedEvent] = ()
    ) -> None:
        self.shared = SharedLedger()
        self.pace = pace or RoundPace(founders=count)
        self.trace = trace
        self.sites: list[ScriptedMembership] = []
        for index in range(count):
            self.add(index)

    def add(self, index: int, terms: Terms = TERMS) -> ScriptedMembership:
        site = ScriptedMembership(self.shared, index, self.trace, self.pace)
        site.join(member(index), terms)
        self.sites.append(site)
        return site

    @property
    def ledger(self) -> Ledger:
        return self.shared.view.ledger

    def until(self, holds: Callable[[Ledger], bool]) -> None:
        with self.shared.changed:
            assert self.shared.changed.wait_for(lambda: holds(self.ledger), timeout=20)

    def begin(
        self, *sites: int, number: int | None = None, tokens: int = 10
    ) -> list[Future[OuterRound]]:
        """Let sites arrive in the order given. Return their calls."""
        number = self.ledger.number if number is None else number
        calls = []
        for each in sites:
            num = len(self.ledger.tokens)
            calls.append(call(self.sites[each].begin_round, number, tokens * (each + 1), HOUR_S))
            self.until(lambda ledger, num=num: len(ledger.tokens) > num or ledger.is_exchanging)
        return calls

    def rounds(self, *sites: int, number: int | None = None) -> list[OuterRound]:
        return results(self.begin(*sites, number=number))

    def commit(self, rounds: dict[int, OuterRound], digest: str = "d") -> list[Future[bool]]:
        return [call(self.sites[i].commit, each, digest) for i, each in rounds.items()]

    def play(self, *sites: int) -> None:
        """Play a whole round. `sites` must be all live members."""
        number = self.ledger.number
        rounds = dict(zip(sites, self.rounds(*sites), strict=True))
        assert results(self.commit(rounds, f"digest {number}")) == [True] * len(sites)


def call(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call in a daemon thread, so that a test that fails does not wait for it."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def results(calls: Sequence[Future[Any]]) -> list[Any]:
    return [call.result(timeout=20) for call in calls]
