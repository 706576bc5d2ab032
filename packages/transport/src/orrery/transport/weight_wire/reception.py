"""Takes as trainer rank 0 sees them: engine ranks arrive, and when all of a take are there, everybody goes.

One take at a time. One that a later take finds incomplete was given up by the orchestrator, and is over.
"""

from pathlib import Path

from orrery.transport.weight_wire.claims import read_taking
from orrery.transport.weight_wire.contract import WireFailed
from orrery.transport.weight_wire.meeting import FOREVER_S, Arrival, Done, Meeting, Order

ARRIVAL_S = 120.0  # for all ranks of all engines of a take, once the first has come
DONE_S = 300.0  # for the other trainer ranks to have sent


class Reception:
    """Belongs to one thread."""

    def __init__(self, meeting: Meeting, folder: Path) -> None:
        self._meeting, self._folder = meeting, folder
        self._num_arrivals = 0
        self._generation = -1
        self._members: tuple[str, ...] = ()

    def next(self) -> Order:
        """Wait for the next take; the order that it leads to, which the engines have been given too."""
        arrived: dict[tuple[str, int], Arrival] = {}
        take = 0
        while True:
            try:
                arrival = self._meeting.get(f"arrival/{self._num_arrivals + 1}", Arrival, "engines", ARRIVAL_S if arrived else FOREVER_S)
            except WireFailed:
                if not arrived:
                    raise
                return self._answer(Order(take, error=f"take {take}: {self._missing(take, arrived)} did not come within {ARRIVAL_S:g} s"))
            self._num_arrivals += 1
            self._meeting.forget(f"arrival/{self._num_arrivals}")
            if arrival.take < 0:
                return Order(-1, end=True)
            if arrival.take < take:
                continue
            if arrival.take > take:
                arrived, take = {}, arrival.take
            arrived[arrival.engine, arrival.rank] = arrival
            taking = read_taking(self._folder / f"take_{take}.json")
            assert taking is not None
            if not self._absent(taking.engines, arrived):
                ordered = [arrived[engine, rank] for engine in taking.engines for rank in range(arrived[engine, 0].world_size)]
                return self._answer(self._order(take, taking.version, tuple(each.member for each in ordered)))

    def gather(self, order: Order, mine: Done, num_ranks: int) -> Done:
        """What came of an order over all trainer ranks: the first error, the longest seconds."""
        every = [
            mine,
            *(
                self._meeting.get(f"done/{order.take}/{rank}", Done, f"trainer {rank}, that it has sent", DONE_S)
                for rank in range(1, num_ranks)
            ),
        ]
        error = next((done.error for done in every if done.error), "")
        if error:
            self._members = ()  # whatever the next take's members are, they form a new group
        keys = {key for done in every for key in done.parts}
        return Done(error, {key: max(done.parts.get(key, 0.0) for done in every) for key in sorted(keys)})

    def _order(self, take: int, version: int, members: tuple[str, ...]) -> Order:
        if members != self._members:
            self._generation, self._members = self._generation + 1, members
        return Order(take, version, self._generation, members)

    def _answer(self, order: Order) -> Order:
        self._meeting.put(f"go/{order.take}", order)
        return order

    @staticmethod
    def _absent(engines: tuple[str, ...], arrived: dict[tuple[str, int], Arrival]) -> list[str]:
        sizes = {engine: each.world_size for (engine, _), each in arrived.items()}
        return [f"{engine} (rank {rank})" for engine in engines for rank in range(sizes.get(engine, 1)) if (engine, rank) not in arrived]

    def _missing(self, take: int, arrived: dict[tuple[str, int], Arrival]) -> str:
        taking = read_taking(self._folder / f"take_{take}.json")
        assert taking is not None
        return ", ".join(self._absent(taking.engines, arrived))
