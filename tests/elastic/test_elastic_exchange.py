"""Exchanges: the weighted mean, equal bits on all sites, and Δ kept when a peer fails."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
from linked_sites import (
    HOST,
    delta_of,
    epoch,
    linked,
    site_process,
    together,
    waiting_process,
)

from orrery.elastic import exchange as module
from orrery.elastic import links as links_module
from orrery.elastic.certificates import make_authority, make_site
from orrery.elastic.codecs import CODECS, codec
from orrery.elastic.exchange import TOPOLOGIES, ErrorFeedback, exchange, layer_buckets
from orrery.elastic.loop import weighted_mean
from orrery.elastic.types import ElasticError, Epoch, LinkBroken, OuterRound, SiteMember

ERRORS = {"float32": 1e-6, "int8_block": 0.03, "int8_codebook": 0.05, "int4_block": 0.5}
ERRORS["top_k_2bit"] = 2.0  # it needs error feedback


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder, "run")
    return make_site(folder, "site")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE", 10_000)


def exchanged(links, deltas, weights, kind="float32", topology="ring", number=0, **options):
    """Exchange copies of `deltas` between all sites. Return each site's result, or error."""
    outer_round = OuterRound(number, epoch(links), tuple(weights))

    def one(rank):
        delta = deltas[rank].copy()
        exchange(delta, outer_round, rank, links[rank], codec(kind), topology, **options)
        return delta

    return together(len(links), one)


def check_equal(results, expected, most):
    assert all(isinstance(each, np.ndarray) for each in results), results
    assert all((each == results[0]).all() for each in results)
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(results[0] - expected) <= most * norm + 1e-12


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_site_has_the_weighted_mean(certificates, topology, count):
    weights = [3, 1, 7, 2, 5][:count]
    with linked(certificates, count, num_lanes=2) as links:
        for number, n in enumerate([0, 1, 3, 1000, 250_001]):
            deltas = [delta_of(rank, n) for rank in range(count)]
            results = exchanged(links, deltas, weights, topology=topology, number=number)
            check_equal(results, weighted_mean(deltas, weights), 1e-6)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_sites_are_equal_to_the_bit_with_every_codec(certificates, topology):
    deltas = [delta_of(rank, 100_003) for rank in range(4)]
    weights = [4, 1, 2, 3]
    with linked(certificates, 4, num_lanes=2) as links:
        for number, kind in enumerate(CODECS):
            results = exchanged(links, deltas, weights, kind, topology, number)
            check_equal(results, weighted_mean(deltas, weights), ERRORS[kind])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_site_of_weight_zero_takes_the_mean_and_changes_no_value(certificates, topology):
    deltas = [delta_of(rank, 50_001) for rank in range(3)]
    for joiner in range(3):
        deltas[joiner] = np.full(50_001, np.nan, np.float32)
        weights = [5, 5, 5]
        weights[joiner] = 0
        with linked(certificates, 3) as links:
            results = exchanged(links, deltas, weights, "int8_block", topology)
        deltas[joiner] = delta_of(joiner, 50_001)
        check_equal(results, weighted_mean(deltas, weights), 0.03)


def test_without_any_weight_the_mean_is_zero(certificates):
    with linked(certificates, 2) as links:
        for result in exchanged(links, [delta_of(0, 9), delta_of(1, 9)], [0, 0]):
            assert (result == 0).all()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_site_with_nan_fails_and_the_others_name_it(certificates, topology):
    deltas = [delta_of(rank, 90_000) for rank in range(3)]
    deltas[1][70_000] = np.nan
    with linked(certificates, 3, num_lanes=2) as links:
        results = exchanged(links, deltas, [1, 1, 1], "int8_block", topology)
    assert isinstance(results[1], ElasticError) and "is nan" in str(results[1])
    for rank in (0, 2):
        assert isinstance(results[rank], LinkBroken) and results[rank].rank == 1
        assert "is nan" in results[rank].reason


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("num_sent", range(0, 13, 2))
def test_after_a_death_at_any_frame_the_survivors_go_on(certificates, topology, num_sent):
    deltas = [delta_of(rank, 90_000) for rank in range(3)]
    kept = [each.copy() for each in deltas]
    whole = weighted_mean(deltas, [1, 2, 3])
    with linked(certificates, 3) as links:
        left, dead = [num_sent], links[1]
        send = dead.send

        def die_after(*frame):
            if not left[0]:
                dead.close()  # as the kernel closes the connections of a killed process
                raise SystemExit
            left[0] -= 1
            return send(*frame)

        dead.send = die_after  # type: ignore[method-assign]
        outer_round = OuterRound(4, epoch(links), (1, 2, 3))

        def one(rank):
            try:
                exchange(kept[rank], outer_round, rank, links[rank], codec("float32"), topology)
            except SystemExit:
                raise RuntimeError("dead") from None

        results = together(3, one)
        for rank in (0, 2):
            if results[rank] is None:
                assert np.allclose(kept[rank], whole, atol=1e-5)
            else:
                assert isinstance(results[rank], LinkBroken) and results[rank].rank == 1
                is_mean = np.isclose(kept[rank], whole, atol=1e-5)
                assert (is_mean | (kept[rank] == deltas[rank])).all()  # nothing in between
        survivors = [links[0], links[2]]
        again = OuterRound(4, epoch(survivors, number=2), (1, 3))

        def retry(rank):
            delta = deltas[2 * rank].copy()
            exchange(delta, again, rank, survivors[rank], codec("float32"), topology)
            return delta

        check_equal(together(2, retry), weighted_mean([deltas[0], deltas[2]], [1, 3]), 1e-6)


@pytest.mark.parametrize(
    ("kind", "topology"), [("int8_block", "ring"), ("int8_codebook", "all_to_all")]
)
def test_processes_are_equal_to_the_bit(certificates, kind, topology):
    context = multiprocessing.get_context("spawn")
    pipes, results = [context.Pipe() for _ in range(3)], context.Queue()
    theirs = [end for _, end in pipes]
    processes = [
        context.Process(
            target=site_process, args=(rank, certificates, theirs, results, kind, topology)
        )
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    ports = [ours.recv() for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(ports)
    found = [np.frombuffer(results.get(timeout=60), np.float32) for _ in processes]
    for ours, _ in pipes:
        ours.send("end")
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    deltas = [delta_of(rank, 700_001) for rank in range(3)]
    check_equal(found, weighted_mean(deltas, [1, 2, 3]), ERRORS[kind])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_killed_or_stopped_process_is_named_by_all(certificates, monkeypatch, number):
    monkeypatch.setattr(links_module, "SILENCE_S", 4.0)  # two pings
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=waiting_process, args=(certificates, theirs))
    process.start()
    try:
        with linked(certificates, 2) as links:
            port = ours.recv()
            members = (*epoch(links).members, SiteMember("f" * 32, HOST, port))
            ours.send((Epoch(1, members), 2, 0))

            def one(rank):
                deltas, outer_round = (
                    delta_of(rank, 90_000),
                    OuterRound(0, Epoch(1, members), (1,) * 3),
                )
                links[rank].begin(outer_round.epoch, rank, 0)
                if rank == 0:
                    ours.recv()
                    os.kill(process.pid, number)
                links[rank].begin = lambda *_: None
                exchange(deltas, outer_round, rank, links[rank], codec("int8_block"))

            for result in together(2, one):
                assert isinstance(result, LinkBroken) and result.rank == 2
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("weights", [(1, 1), (1, 1, 0)])
def test_error_feedback_keeps_all_that_encoding_lost(certificates, weights):
    deltas = [delta_of(rank, 20_000) for rank in range(len(weights))]
    feedback = [ErrorFeedback(20_000) for _ in deltas]
    sums = np.zeros(20_000)
    expected = weighted_mean(deltas, list(weights))
    with linked(certificates, len(weights)) as links:
        for number in range(5):
            outer_round = OuterRound(number, epoch(links), weights)

            def one(rank, outer_round=outer_round):
                delta = deltas[rank].copy()
                options = {"error_feedback": feedback[rank]}
                coder = codec("top_k_2bit")
                exchange(delta, outer_round, rank, links[rank], coder, "all_to_all", **options)
                return delta

            results = together(len(weights), one)
            check_equal(results, expected, 10.0)
            for each in feedback:
                each.commit()
            sums += results[0]
    owed = sum(each.lost for each in feedback)
    assert np.linalg.norm(owed) > 1
    np.testing.assert_allclose(sums + owed, 5 * expected, atol=1e-5)


def test_an_uncommitted_exchange_leaves_error_feedback_as_it_was(certificates):
    feedback = ErrorFeedback(1000)
    deltas = [delta_of(rank, 1000) for rank in range(2)]
    with linked(certificates, 2) as links:
        exchanged(links, deltas, [1, 1], "int4_block", error_feedback=feedback)
    assert not feedback.lost.any() and feedback.pending.any()


def test_buckets_and_the_rings_order_keep_sites_equal(certificates, monkeypatch):
    monkeypatch.setattr(module, "ring_order", lambda epoch: (0, 2, 1, 3))
    deltas = [delta_of(rank, 60_000) for rank in range(4)]
    buckets = [slice(0, 7), slice(7, 30_001), slice(30_001, 60_000)]
    with linked(certificates, 4, num_lanes=3) as links:
        results = exchanged(links, deltas, [1, 1, 1, 1], "int8_block", "ring", buckets=buckets)
    check_equal(results, weighted_mean(deltas, [1, 1, 1, 1]), 0.03)


def test_buckets_follow_the_layers_of_names():
    sizes = {"embed.weight": 5, "layers.0.a": 2, "layers.0.b": 3, "layers.1.a": 4, "norm": 1}
    assert layer_buckets(sizes) == [slice(0, 5), slice(5, 10), slice(10, 14), slice(14, 15)]


def test_an_unknown_topology_is_named(certificates):
    with linked(certificates, 2) as links:
        (first, _) = exchanged(links, [delta_of(0, 9)] * 2, [1, 1], topology="star")
    assert isinstance(first, ElasticError) and "'star' is unknown" in str(first)
