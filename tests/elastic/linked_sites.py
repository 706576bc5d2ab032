"""Sites over real links, as threads and processes, for tests of exchanges."""

import signal
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from orrery.elastic.certificates import Certificates
from orrery.elastic.codecs import codec
from orrery.elastic.exchange import exchange
from orrery.elastic.links import PeerLinks
from orrery.elastic.types import Epoch, OuterRound, SiteMember

HOST = "127.0.0.1"


@contextmanager
def linked(
    certificates: Certificates, count: int, num_lanes: int = 1, outbound: Container[int] = ()
) -> Iterator[list[PeerLinks]]:
    """Open links of `count` sites. Sites `outbound` accept no connections."""
    links = [
        PeerLinks("run", certificates, "" if rank in outbound else HOST, num_lanes=num_lanes)
        for rank in range(count)
    ]
    try:
        yield links
    finally:
        for each in links:
            each.close()


def epoch(links: list[PeerLinks], number: int = 1) -> Epoch:
    return Epoch(
        number, tuple(SiteMember(f"{i:032x}", HOST, each.port) for i, each in enumerate(links))
    )


def together(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Call `call(rank)` for all ranks at once. Return the results, or the exceptions."""
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), f"a site hangs: {results}"
    return results


def delta_of(rank: int, n: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(n).astype(np.float32)


def site_process(rank, certificates, ports, results, kind, topology):
    links = PeerLinks("run", certificates, HOST)
    ports[rank].send(links.port)
    members = tuple(
        SiteMember(f"{i:032x}", HOST, port) for i, port in enumerate(ports[rank].recv())
    )
    delta = delta_of(rank, 700_001)
    outer_round = OuterRound(0, Epoch(1, members), tuple(range(1, len(members) + 1)))
    exchange(delta, outer_round, rank, links, codec(kind), topology)
    results.put(delta.tobytes())
    ports[rank].recv()  # the others may not have finished
    links.close()


def waiting_process(certificates, pipe):
    links = PeerLinks("run", certificates, HOST, num_lanes=1)
    pipe.send(links.port)
    links.begin(*pipe.recv())
    pipe.send("linked")
    signal.pause()
