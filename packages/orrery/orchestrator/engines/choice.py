"""Choose an engine, or a data-parallel rank of one, for the turns of a session."""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager

SESSIONS_AT_MOST = 65_536  # older sessions are forgotten


class SessionAffinity:
    def __init__(self, num_engines: int):
        self.in_flight = [0] * num_engines
        self._homes: OrderedDict[str, int] = OrderedDict()

    def choose(self, session: str, among: Collection[int]) -> int:
        """Return the session's engine if it is in `among`, otherwise the least loaded engine."""
        home = self._homes.pop(session, None)
        if home is None or home not in among:
            home = min(among, key=self.in_flight.__getitem__)
        self._homes[session] = home
        if len(self._homes) > SESSIONS_AT_MOST:
            self._homes.popitem(last=False)
        return home

    @contextmanager
    def using(self, session: str, among: Collection[int]) -> Iterator[int]:
        """Choose, and count the request as in flight in the `with` body."""
        home = self.choose(session, among)
        self.in_flight[home] += 1
        try:
            yield home
        finally:
            self.in_flight[home] -= 1
