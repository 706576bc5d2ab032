"""Define the ledger, the shared state of a run's epochs and rounds, as pure functions.

- Each function returns the next ledger, is idempotent and reads no clock.
- `live`: ids of sites with a lease.
- A round gathers sites. They exchange weight changes, then report the new state's digest or lost
  peers.
- An epoch's members and network paths are fixed. A restarted round begins a new epoch.
"""

import sys
from collections.abc import Iterable, Mapping, Set
from itertools import combinations

import msgspec

from orrery.elastic.routes import GAIN, slowest_edge
from orrery.elastic.types import (
    NO_ROUND,
    ElasticError,
    Epoch,
    LeaseLost,
    OuterRound,
    SiteMember,
    Terms,
    check_terms,
)


class Behind(LeaseLost):
    """This site lacks the last committed round, `committed`."""

    def __init__(self, site_id: str, committed: int) -> None:
        super().__init__(
            f"site {site_id[:8]} lacks round {committed}; it takes a snapshot from its peers"
        )
        self.committed = committed


class StateLacking(ElasticError):
    """No live member can send the joining site the newest state."""


class JoiningSite(msgspec.Struct, frozen=True):
    member: SiteMember
    has_weight: bool  # False if the site joined with an old state


class CommittedRound(msgspec.Struct, frozen=True):
    number: int
    epoch: int
    members: tuple[SiteMember, ...]
    weights: tuple[int, ...]
    digest: str


class Ledger(msgspec.Struct, frozen=True):
    terms: Terms | None = None
    epoch: int = 0
    members: tuple[SiteMember, ...] = ()
    joining: tuple[JoiningSite, ...] = ()
    is_exchanging: bool = False
    tokens: dict[str, int] = {}  # weights of arrived sites, by id
    weights: tuple[int, ...] = ()  # weight by rank, while exchanging
    digests: dict[str, str] = {}  # state digest by member id
    broken: dict[str, tuple[str, ...]] = {}  # lost peers, by the reporting member's id
    strikes: tuple[tuple[str, str], ...] = ()  # pairs whose link broke in the last attempt
    measured: dict[str, dict[str, int]] = {}  # Mb/s by site id and peer id
    speeds: tuple[tuple[int, ...], ...] = ()  # as in `Epoch`
    committed: CommittedRound | None = None

    @property
    def last(self) -> int:
        return self.committed.number if self.committed else NO_ROUND

    @property
    def number(self) -> int:
        return self.last + 1

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(member.id for member in self.members)

    @property
    def known(self) -> frozenset[str]:
        return self.ids | {each.member.id for each in self.joining}

    @property
    def current(self) -> Epoch:
        return Epoch(self.epoch, self.members, self.speeds)

    def open_round(self, site_id: str) -> OuterRound | None:
        """Return the running exchange if member `site_id` has not reported in it."""
        if not self.is_exchanging or site_id not in self.ids or site_id in self.reported:
            return None
        return OuterRound(self.number, self.current, self.weights)

    @property
    def reported(self) -> frozenset[str]:
        return frozenset(self.digests) | frozenset(self.broken)


def admit(
    ledger: Ledger, site: SiteMember, terms: Terms, live: Set[str], max_sites: int = sys.maxsize
) -> Ledger:
    """Add a site.

    The site joins at the next exchange, or at once if it has the newest state, no exchange runs,
    and either no round is committed or no member is live. Raise StateLacking if no member is live
    and the site lacks the newest state, and ElasticError if `max_sites` live sites take part or
    `terms` do not meet the run's.
    """
    if ledger.terms is not None:
        check_terms(ledger.terms, terms)
    if site.id in ledger.known:
        return ledger
    if len(ledger.known & live) >= max_sites:
        raise ElasticError(
            f"trainer.elastic.max_sites {max_sites}: that many sites already take part; join when "
            "one has left"
        )
    digest = ledger.committed.digest if ledger.committed else ""
    is_first = not ledger.ids & live
    if is_first and terms.rewinds and terms.round > NO_ROUND:
        # A new epoch invalidates messages of the rewound rounds.
        row = CommittedRound(terms.round, ledger.epoch, (), (), terms.digest)
        ledger = _gather(_with_members(msgspec.structs.replace(ledger, committed=row), ()), {})
        digest = terms.digest
    holds_state = (terms.round, terms.digest) == (ledger.last, digest)
    if is_first and not holds_state:
        raise StateLacking(
            f"the run stands at round {ledger.last} and no site is live, but this site holds the "
            f"state of round {terms.round}; first start the site with the newest checkpoint, with "
            "--rewind if the run is ahead of that checkpoint"
        )
    ledger = msgspec.structs.replace(
        ledger, terms=ledger.terms or msgspec.structs.replace(terms, round=NO_ROUND, digest="")
    )
    if not ledger.is_exchanging and holds_state and (is_first or ledger.committed is None):
        return _with_members(ledger, [*(m for m in ledger.members if m.id in live), site])
    joining = (*ledger.joining, JoiningSite(site, has_weight=holds_state))
    return msgspec.structs.replace(ledger, joining=joining)


def arrive(ledger: Ledger, site_id: str, number: int, tokens: int) -> Ledger:
    """Record that a site enters round `number` with weight `tokens`.

    Raise Behind if the round is over, and LeaseLost if the site is unknown or the round is later
    than the run's.
    """
    joining = {each.member.id: each for each in ledger.joining}
    if site_id not in ledger.ids and site_id not in joining:
        raise LeaseLost(f"site {site_id[:8]} left the run in epoch {ledger.epoch} or before")
    if number < ledger.number:
        raise Behind(site_id, ledger.last)
    if number > ledger.number:
        raise LeaseLost(
            f"site {site_id[:8]} asks for round {number}, but the run is at round {ledger.last}"
        )
    if ledger.is_exchanging or site_id in ledger.tokens:
        return ledger
    if site_id in joining and not joining[site_id].has_weight:
        tokens = 0
    return msgspec.structs.replace(ledger, tokens=ledger.tokens | {site_id: tokens})


def measure(ledger: Ledger, site_id: str, found: Mapping[str, int]) -> Ledger:
    own = {**ledger.measured.get(site_id, {}), **found}
    if own == ledger.measured.get(site_id, {}):
        return ledger
    return msgspec.structs.replace(ledger, measured=ledger.measured | {site_id: own})


def has_quorum(ledger: Ledger, live: Set[str], quorum: int) -> bool:
    """Return whether at least `quorum` live sites have arrived for an exchange.

    A live member, if any, must be among them, or the new epoch would drop all members.
    """
    arrived, members = ledger.tokens.keys() & live, ledger.ids & live
    has_member = not members or bool(members & arrived)
    return not ledger.is_exchanging and has_member and len(arrived) >= max(quorum, 1)


def may_have_quorum(ledger: Ledger, live: Set[str], quorum: int) -> bool:
    return len(ledger.known & live) >= quorum


def is_complete(ledger: Ledger, live: Set[str]) -> bool:
    return (ledger.ids & live) <= ledger.tokens.keys()


def start(ledger: Ledger, live: Set[str]) -> Ledger:
    if ledger.is_exchanging or not ledger.tokens.keys() & live:
        return ledger
    known = {m.id: m for m in (*(each.member for each in ledger.joining), *ledger.members)}
    arrived = [known[each] for each in ledger.tokens if each in live and each in known]
    late = [m for m in ledger.members if m.id in live and m.id not in ledger.tokens]
    ids = {m.id for m in arrived}
    joining = [each for each in ledger.joining if each.member.id in live - ids]
    joining += [JoiningSite(m, has_weight=True) for m in late]
    ledger = _with_better_paths(_with_members(ledger, arrived))
    return msgspec.structs.replace(
        ledger,
        is_exchanging=True,
        joining=tuple(joining),
        weights=tuple(ledger.tokens[m.id] for m in ledger.members),
        digests={},
        broken={},
    )


def acknowledge(ledger: Ledger, site_id: str, outer_round: OuterRound, digest: str) -> Ledger:
    if not _is_open(ledger, site_id, outer_round):
        return ledger
    return msgspec.structs.replace(ledger, digests=ledger.digests | {site_id: digest})


def report(ledger: Ledger, site_id: str, outer_round: OuterRound, lost: Iterable[int]) -> Ledger:
    if not _is_open(ledger, site_id, outer_round):
        return ledger
    peers = tuple(sorted(outer_round.epoch.members[rank].id for rank in set(lost)))
    return msgspec.structs.replace(ledger, broken=ledger.broken | {site_id: peers})


def settle(ledger: Ledger, live: Set[str], has_waited: bool = False, quorum: int = 1) -> Ledger:
    """Commit or restart the round once every live member has reported.

    One member's report suffices after the time limit (`has_waited`). Commit if no report names a
    lost peer and most have the same digest, and drop members without this digest. Otherwise
    restart with the members that reported, or gather sites again if these are fewer than `quorum`.
    """
    if not ledger.is_exchanging:
        return ledger
    present = ledger.ids & ledger.reported & live
    if (ledger.ids & live) - present and not (has_waited and present):
        return ledger
    if not present:
        return ledger if ledger.ids & live else _gather(_with_members(ledger, ()), {})
    if not present & ledger.broken.keys():
        digests = [ledger.digests[each] for each in present]
        digest = max(sorted(set(digests)), key=digests.count)
        if 2 * digests.count(digest) > len(digests):
            return _commit(ledger, {each for each in present if ledger.digests[each] == digest})
    restarted = _restart(ledger, present)
    if len(restarted.members) >= quorum:
        return restarted
    return _gather(restarted, {m.id: ledger.tokens[m.id] for m in restarted.members})


def _commit(ledger: Ledger, agreed: Set[str]) -> Ledger:
    digest = next(ledger.digests[each] for each in agreed)
    row = CommittedRound(ledger.number, ledger.epoch, ledger.members, ledger.weights, digest)
    kept = tuple(m for m in ledger.members if m.id in agreed)
    return _gather(_with_members(msgspec.structs.replace(ledger, committed=row), kept), {})


def _restart(ledger: Ledger, present: Set[str]) -> Ledger:
    """Restart the round without one site of each link that broke twice in a row."""
    pairs = {
        (min(a, b), max(a, b)) for a in present for b in ledger.broken.get(a, ()) if b in present
    }
    kept = largest_connected(present, pairs & set(ledger.strikes))
    weight_of = dict(zip((m.id for m in ledger.members), ledger.weights, strict=True))
    members = tuple(m for m in ledger.members if m.id in kept)
    return msgspec.structs.replace(
        ledger,
        epoch=ledger.epoch + 1,
        members=members,
        speeds=_speeds(ledger, members),
        weights=tuple(weight_of[m.id] for m in members),
        digests={},
        broken={},
        strikes=tuple(sorted(pairs)),
    )


def largest_connected(sites: Set[str], broken: Set[tuple[str, str]]) -> frozenset[str]:
    """Return the largest subset of `sites` without a `broken` pair. Prefer low ids."""
    involved = sorted({each for pair in broken for each in pair})
    for num_dropped in range(len(involved) + 1):
        for dropped in combinations(reversed(involved), num_dropped):
            if all(a in dropped or b in dropped for a, b in broken):
                return frozenset(sites) - frozenset(dropped)
    return frozenset(sites)


def _gather(ledger: Ledger, tokens: dict[str, int]) -> Ledger:
    return msgspec.structs.replace(
        ledger, is_exchanging=False, tokens=tokens, weights=(), digests={}, broken={}, strikes=()
    )


def _is_open(ledger: Ledger, site_id: str, outer_round: OuterRound) -> bool:
    is_current = (ledger.number, ledger.epoch) == (outer_round.number, outer_round.epoch.number)
    return is_current and ledger.open_round(site_id) is not None


def _with_members(ledger: Ledger, members: Iterable[SiteMember]) -> Ledger:
    ordered = tuple(sorted(members))
    if ordered == ledger.members:
        return ledger
    speeds = _speeds(ledger, ordered)
    return msgspec.structs.replace(ledger, members=ordered, epoch=ledger.epoch + 1, speeds=speeds)


def _with_better_paths(ledger: Ledger) -> Ledger:
    """Drop speeds of absent sites. Begin an epoch if new paths make the ring GAIN times faster."""
    known = ledger.known
    kept = {a: {b: m for b, m in row.items() if b in known} for a, row in ledger.measured.items()}
    ledger = msgspec.structs.replace(
        ledger, measured={a: row for a, row in kept.items() if a in known}
    )
    newest = Epoch(ledger.epoch, ledger.members, _speeds(ledger, ledger.members))
    if slowest_edge(newest, newest) <= GAIN * slowest_edge(newest, ledger.current):
        return ledger
    return msgspec.structs.replace(ledger, epoch=ledger.epoch + 1, speeds=newest.speeds)


def _speeds(ledger: Ledger, members: Iterable[SiteMember]) -> tuple[tuple[int, ...], ...]:
    rows = [ledger.measured.get(a.id, {}) for a in members]
    found = tuple(tuple(row.get(b.id, 0) for b in members) for row in rows)
    return found if any(map(any, found)) else ()


class ShardMap(msgspec.Struct):
    """Assign a shard of the training data to each site. `holders`: shard by site id.

    `trained[k]`: number of possibly trained documents of shard k, which its next holder skips.
    `num_idle`: rounds without training, with all weights 0.
    """

    trained: list[int]
    holders: dict[str, int] = {}
    num_idle: int = 0

    def finish_round(
        self, members: tuple[SiteMember, ...], num_documents: int, num_begun: int = 0
    ) -> None:
        """Count a round's documents, and assign shards to its members.

        `num_begun`: documents of the next round that a lost site may have trained.
        """
        ids = {each.id for each in members}
        for site_id, shard in self.holders.items():
            self.trained[shard] += num_documents + num_begun * (site_id not in ids)
        kept = {each.id: self.holders[each.id] for each in members if each.id in self.holders}
        for member in members:
            if member.id not in kept:
                free = sorted(set(range(len(self.trained))) - set(kept.values()))
                if not free:
                    raise ElasticError(
                        f"stages.sft.data.num_shards {len(self.trained)}: {len(members)} sites "
                        f"take part, so site {member.id[:8]} gets no shard; stop this site"
                    )
                kept[member.id] = member.shard if member.shard in free else free[0]
        self.holders = kept
