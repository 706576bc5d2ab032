"""Takes as trainer rank 0 sees them: engine ranks arrive, and when all of a take are there, everybody goes.

One take at a time. One that is given up, or that a later take finds incomplete, is over. So is one whose version is not to be had any more:
whether it is, `admit` says in the moment in which the take begins.
"""

from collections.abc import Callable
from pathlib import Path

from orrery.transport.weight_wire.claims import Taking, read_taking, take_path
from orrery.transport.weight_wire.contract import TakeFailed, WireFailed
from orrery.transport.weight_wire.meeting import FOREVER_S, Arrival, Done, Meeting, Order

ARRIVAL_S = 120.0  # for all ranks of all engines of a take, once the first has come
DONE_S = 300.0  # for the other trainer ranks to have sent


class Reception:
    """Belongs to one thread."""

    def __init__(self, meeting: Meeting, folder: Path, admit: Callable[[Taking], str]) -> None:
        """`admit` says why a take may not begin, or "" where it has begun."""
        self._meeting, self._folder, self._admit = meeting, folder, admit
        self._num_arrivals = self._answered = 0
        self._generation = -1
        self._members: tuple[str, ...] = ()
        self._member: dict[tuple[str, int], str] = {}  # by engine and rank, the newest

    def next(self) -> Order:
        """Wait for the next take; the order that it leads to, which the engines have been given too."""
        arrived: dict[tuple[str, int], Arrival] = {}
        taking: Taking | None = None
        while True:
            try:
                arrival = self._next_arrival(taking)
            except WireFailed:
                if taking is None:
                    raise
                missing = ", ".join(self._absent(taking.engines, arrived)) + " did not come"
                is_on = take_path(self._folder, taking.take, taking.claim).exists()
                until = "" if is_on else " before the take was given up"
                return self._answer(
                    Order(taking.take, version=taking.version, error=missing + until)
                )
            if arrival.take < 0:
                return Order(-1, end=True)
            if arrival.take <= self._answered or (
                taking is not None and arrival.take < taking.take
            ):
                continue  # who comes as late sees that its take is over
            if taking is None or arrival.take > taking.take:
                try:
                    arrived, taking = (
                        {},
                        read_taking(take_path(self._folder, arrival.take, arrival.claim)),
                    )
                except TakeFailed:
                    return self._answer(Order(arrival.take, error="it was given up"))
                assert taking is not None
            arrived[arrival.engine, arrival.rank] = arrival
            if not self._absent(taking.engines, arrived):
                ordered = [
                    arrived[engine, rank]
                    for engine in taking.engines
                    for rank in range(arrived[engine, 0].world_size)
                ]
                return self._answer(self._order(taking, ordered))

    def gather(self, order: Order, mine: Done, num_ranks: int) -> Done:
        """What came of an order over all trainer ranks: the first error, the longest seconds."""
        every = [mine]
        for rank in range(1, num_ranks):
            key = f"done/{order.take}/{rank}"
            every.append(self._meeting.get(key, Done, f"trainer {rank}, that it has sent", DONE_S))
            self._meeting.forget(key)
        error = next((done.error for done in every if done.error), "")
        if error:
            self._members = ()  # whatever the next take's members are, they form a new group
        keys = {key for done in every for key in done.parts}
        return Done(
            error, {key: max(done.parts.get(key, 0.0) for done in every) for key in sorted(keys)}
        )

    def _next_arrival(self, taking: Taking | None) -> Arrival:
        key = f"arrival/{self._num_arrivals + 1}"
        with self._meeting.during(
            take_path(self._folder, taking.take, taking.claim) if taking is not None else None
        ):
            arrival = self._meeting.get(
                key, Arrival, "engines", FOREVER_S if taking is None else ARRIVAL_S
            )
        self._num_arrivals += 1
        who = arrival.engine, arrival.rank
        self._meeting.forget(key)
        if self._member.get(who, arrival.member) != arrival.member:  # an incarnation that has ended
            self._meeting.forget(f"member/{self._member[who]}")
        self._member[who] = arrival.member
        return arrival

    def _order(self, taking: Taking, arrived: list[Arrival]) -> Order:
        if refusal := self._admit(taking):
            return Order(taking.take, version=taking.version, error=refusal)
        members = tuple(each.member for each in arrived)
        if members != self._members or any(each.generation != self._generation for each in arrived):
            self._generation, self._members = self._generation + 1, members
        return Order(taking.take, taking.claim, taking.version, self._generation, members)

    def _answer(self, order: Order) -> Order:
        """Who waits for the answer to an earlier take sees that it is over."""
        self._meeting.put(f"go/{order.take}", order)
        self._meeting.forget(f"go/{self._answered}")
        self._answered = order.take
        return order

    @staticmethod
    def _absent(engines: tuple[str, ...], arrived: dict[tuple[str, int], Arrival]) -> list[str]:
        sizes = {engine: each.world_size for (engine, _), each in arrived.items()}
        return [
            f"{engine} (rank {rank})"
            for engine in engines
            for rank in range(sizes.get(engine, 1))
            if (engine, rank) not in arrived
        ]
