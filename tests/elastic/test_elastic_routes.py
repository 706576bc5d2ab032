"""Routes: the ring's order, relays, and the speeds behind them."""

import itertools
import random
import time
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from linked_sites import delta_of, epoch, linked, together

from orrery.elastic import connection
from orrery.elastic import links as module
from orrery.elastic.certificates import make_authority, make_site
from orrery.elastic.codecs import codec
from orrery.elastic.connection import Header, Kind
from orrery.elastic.exchange import exchange
from orrery.elastic.links import SpeedProbe
from orrery.elastic.loop import weighted_mean
from orrery.elastic.routes import relay, ring_order, slowest_edge
from orrery.elastic.types import Epoch, LinkBroken, OuterRound, SiteMember


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder, "run")
    return make_site(folder, "site")


def sites(speeds, closed=()):
    """Return an epoch with the symmetric speeds of {(a, b): Mb/s}, 900 by default."""
    num = max(max(pair) for pair in speeds) + 1
    rows = [[900 * (a != b) for b in range(num)] for a in range(num)]
    for (a, b), speed in speeds.items():
        rows[a][b] = rows[b][a] = speed
    members = (SiteMember(f"{i:032x}", "h", 0 if i in closed else 4000) for i in range(num))
    return Epoch(1, tuple(members), tuple(map(tuple, rows)))


def without_relays(chosen):
    members = tuple(msgspec.structs.replace(each, port=0) for each in chosen.members)
    return msgspec.structs.replace(chosen, members=members)


@pytest.mark.parametrize("seed", range(5))
def test_the_ring_has_the_fastest_slowest_edge(seed):
    draw, num = random.Random(seed), 4 + seed % 4
    pairs = itertools.combinations(range(num), 2)
    chosen = without_relays(sites({pair: draw.randrange(1, 1000) for pair in pairs}))

    def slowest(order):
        return min(chosen.speeds[a][b] for a, b in zip(order, [*order[1:], order[0]], strict=True))

    best = max(slowest([0, *rest]) for rest in itertools.permutations(range(1, num)))
    assert slowest(ring_order(chosen)) == slowest_edge(chosen, chosen) == best
    assert sorted(ring_order(chosen)) == list(range(num))


def test_a_large_ring_avoids_a_slow_edge():
    chosen = sites({(0, 1): 5, (0, 11): 900})
    order = ring_order(chosen)
    assert sorted(order) == list(range(12)) and abs(order.index(0) - order.index(1)) > 1


def test_a_slow_pair_meets_over_the_fastest_third_site():
    assert relay(sites({(0, 1): 100, (0, 2): 300, (1, 3): 950}), 0, 1) == 3
    assert relay(sites({(0, 1): 100, (1, 2): 210}), 0, 1) is None  # a relay's path counts half
    assert relay(sites({(0, 1): 100, (1, 2): 900}, closed={2}), 0, 1) is None


def test_sites_without_a_listener_meet_over_those_that_have_one():
    chosen = Epoch(1, sites({(0, 5): 1}, closed={1, 2, 3}).members)
    pairs = [(1, 2), (1, 3), (2, 3)]
    assert len({relay(chosen, a, b) for a, b in pairs}) > 1  # they share the relays
    assert all(relay(chosen, a, b) == relay(chosen, b, a) in {0, 4, 5} for a, b in pairs)
    assert relay(chosen, 0, 1) is None


@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
def test_sites_without_a_listener_exchange_and_the_relay_reads_nothing(
    certificates, topology, monkeypatch
):
    seen = bytearray()

    def spying(self, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)
        connection._shut(source, target)
        source.close()

    monkeypatch.setattr(connection.Relay, "_pass", spying)
    deltas = [delta_of(rank, 30_000) for rank in range(4)]
    deltas[1][:], deltas[3][:] = 1.0, 3.0
    with linked(certificates, 4, num_lanes=2, outbound={0, 1, 3}) as links:
        outer_round = OuterRound(0, epoch(links), (1, 1, 1, 1))

        def one(rank):
            delta = deltas[rank].copy()
            exchange(delta, outer_round, rank, links[rank], codec("float32"), topology)
            return delta

        results = together(4, one)
    assert all((each == results[0]).all() for each in results), results
    assert np.allclose(results[0], weighted_mean(deltas, [1, 1, 1, 1]), atol=1e-5)
    assert len(seen) > 30_000
    assert np.float32(0.25).tobytes() * 4 not in seen and b"ORX1" not in seen


def test_the_end_of_a_relay_breaks_its_pairs_and_they_meet_over_another(certificates):
    with linked(certificates, 4, outbound={0, 1}) as links:
        members = epoch(links)
        assert together(4, lambda rank: links[rank].begin(members, rank, 0)) == [None] * 4
        over = relay(members, 0, 1)
        links[over].close()
        with pytest.raises(LinkBroken):
            links[0].receive(0, 10.0)
        left = [each for rank, each in enumerate(links) if rank != over]
        again = epoch(left, 2)
        assert together(3, lambda rank: left[rank].begin(again, rank, 0)) == [None] * 3
        left[0].send(1, 0, 0, 0, np.frombuffer(b"over", np.uint8))
        assert left[1].receive(0, 10.0).payload.tobytes() == b"over"


def test_two_sites_without_a_listener_are_told_why_they_cannot_meet(certificates):
    with linked(certificates, 2, outbound={0, 1}) as links:
        members = epoch(links)
        found = together(2, lambda rank: links[rank].begin(members, rank, 0))
        assert all("no site of the pair accepts" in each.reason for each in found)


def test_speeds_are_measured_between_rounds(certificates, monkeypatch):
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    monkeypatch.setattr("orrery.elastic.links.PROBE_S", 0.05)
    with linked(certificates, 3) as links:
        members = epoch(links)
        together(3, lambda rank: links[rank].begin(members, rank, 0))
        for each in links:
            each.end()
        end_s = time.monotonic() + 20
        while not all(len(each.speeds()) == 2 for each in links):
            assert time.monotonic() < end_s
            time.sleep(0.01)
        ids = {each.id for each in members.members}
        for rank, each in enumerate(links):
            assert each.speeds().keys() == ids - {members.members[rank].id}
            assert min(each.speeds().values()) > 0


def test_a_measurement_counts_its_second_half(monkeypatch):
    probe, header = SpeedProbe(), Header(b"", 1, 0, 2, 0, Kind.PROBE, 0, 0, 0, 0)
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    for num in range(11):
        clock.now_s = num / 10
        last = probe.arrived(header._replace(hop=num == 10), np.empty(125_000, np.uint8))
    assert last == 10  # 1 Mb every 0.1 s
    frame = np.empty(125_000, np.uint8)
    probe.arrived(header, frame)  # the sender's next round interrupts this measurement
    for num in range(11):
        clock.now_s = 60 + num / 10
        last = probe.arrived(header._replace(round=1, hop=num == 10), frame)
    assert last == 10
