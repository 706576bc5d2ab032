"""Direct wires: slices go only from trainer ranks that own them to engine ranks that need them."""

import importlib.util
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from direct_wire import BUCKET_BYTES, SHAPES, Engine, Leases, together, trainers, weights

from orrery.wire.fingerprint import tensor_fingerprint
from orrery.wire.weight_wire import (
    TransferFailed,
    WireFailed,
    coordinator,
    links,
)
from orrery.wire.weight_wire.coordinator import Coordinator, PartTimer
from orrery.wire.weight_wire.leases import ELSEWHERE, GONE
from orrery.wire.weight_wire.links import GroupLink
from orrery.wire.weight_wire.transfer import WeightReceiver, _SendLoop

without_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NOT TESTED: NIXL, which is not installed here"
)


@pytest.fixture(params=["nccl", pytest.param("nixl", marks=without_nixl)])
def kind(request):
    return request.param


def publish(ranks, version):
    published = together(*(lambda rank=rank: rank.publish(version) for rank in ranks))
    assert published[1:] == [None] * (len(ranks) - 1)
    return published[0]


def settle(ranks):
    for waited in together(*(rank.source.settle for rank in ranks)):
        assert isinstance(waited, float), waited


def check(engine, version):
    """Check that exactly the needed slices arrived, in the dtype of the wire."""
    seen = dict.fromkeys(SHAPES, 0)
    for (name, box), tensor in engine.got.items():
        assert torch.equal(
            tensor, weights(version)[name][tuple(slice(*side) for side in box)].bfloat16()
        )
        assert tensor.nbytes <= BUCKET_BYTES
        seen[name] += tensor.numel()
    needs = engine.needs(
        [type("T", (), {"name": name, "shape": shape}) for name, shape in SHAPES.items()]
    )
    assert seen == {
        name: sum(torch.Size(b - a for a, b in box).numel() for box in boxes)
        for name, boxes in needs.items()
    }


@pytest.mark.parametrize(("num_ranks", "replicas"), [(1, 1), (2, 1), (4, 2)])
def test_every_engine_rank_gets_its_slices_and_every_rank_knows_the_whole_fingerprints(
    tmp_path, kind, num_ranks, replicas
):
    engines = [Engine("engine 0", 0, 2), Engine("engine 0", 1, 2), Engine("engine 1", 0, 1)]
    with trainers(kind, tmp_path / "wire", num_ranks, replicas) as (ranks, watch):
        leases = Leases(ranks[0].source)
        for version in (0, 1, 5):
            published = publish(ranks, version)
            assert watch.latest() == published
            assert published.fingerprints == {
                name: tensor_fingerprint(whole.bfloat16())
                for name, whole in weights(version).items()
            }
            claimed = leases.start(published, "engine 0", "engine 1")
            for held in together(*(partial(engine.take, claimed) for engine in engines)):
                assert held == published.fingerprints
            leases.release()
            for engine in engines:
                check(engine, version)
            settle(ranks)
            assert watch.latest() is None
            assert leases.start(published, "engine 0") is None
        assert [(version, error) for version, error, _ in ranks[0].takes] == [
            (0, ""),
            (1, ""),
            (5, ""),
        ]


def test_a_version_that_nobody_claims_keeps_nobody_waiting(tmp_path, kind):
    with trainers(kind, tmp_path / "wire", 2) as (ranks, _):
        leases = Leases(ranks[0].source)
        publish(ranks, 0)
        settle(ranks)
        published = publish(ranks, 1)
        leases.start(published, "engine 0")
        leases.release()
        settle(ranks)


def test_a_trainer_waits_with_its_step_for_what_was_claimed(tmp_path, kind):
    engine = Engine("engine 0", 0, 1)
    with trainers(kind, tmp_path / "wire", 2) as (ranks, _):
        leases = Leases(ranks[0].source)
        published = publish(ranks, 3)
        claimed = leases.start(published, "engine 0")

        def step(rank):
            rank.source.settle()
            rank.load(99)

        *steps, held = together(
            *(lambda rank=rank: step(rank) for rank in ranks), lambda: engine.take(claimed)
        )
        assert steps == [None, None]
        assert held == published.fingerprints
        check(engine, 3)


def test_after_an_engine_ends_during_a_transfer_the_others_form_a_group_and_it_comes_back(
    tmp_path, kind
):
    whole, ending = Engine("engine 0", 0, 1), Engine("engine 1", 0, 1)
    with trainers(kind, tmp_path / "wire", 2) as (ranks, _):
        leases = Leases(ranks[0].source)
        published = publish(ranks, 0)
        claimed = leases.start(published, "engine 0", "engine 1")
        settling = threading.Thread(target=settle, args=(ranks,), daemon=True)

        def end_in_the_middle():
            ending.target.join(claimed.folder, ending.needs)
            rounds = ending.target.receive(claimed.transfer, PartTimer())
            next(rounds)
            settling.start()
            rounds.close()
            leases.abandon(claimed)  # as the fleet does where an engine does not answer

        failed, ended = together(lambda: whole.take(claimed), end_in_the_middle)
        assert ended is None and isinstance(failed, TransferFailed), failed
        again = leases.start(claimed, "engine 0")
        assert settling.is_alive(), "the trainer steps while engines are half-way"
        assert whole.take(again) == published.fingerprints
        check(whole, 0)
        leases.release()
        settling.join(60)
        assert not settling.is_alive()
        (failed_version, first, _), (version, second, _) = ranks[0].takes
        assert failed_version == 0 and "engine 1 (rank 0)" in first and (version, second) == (0, "")
        back, published = Engine("engine 1", 0, 1), publish(ranks, 1)
        for engines in ([back], [whole, back]):
            claimed = leases.start(published, *(engine.target.engine for engine in engines))
            assert together(*(partial(engine.take, claimed) for engine in engines)) == [
                published.fingerprints
            ] * len(engines)
            leases.release()
        kept = [
            ranks[0].source._store.store.check([f"member/{engine.target._member}"])
            for engine in (whole, back, ending)
        ]
        assert kept == [True, True, False]


def test_an_engine_of_which_one_rank_fails_alone_takes_nothing_and_all_its_ranks_meet_again(
    tmp_path, kind
):
    """The rank fails after it received everything; the others notice only when told."""
    engines = [Engine("engine 0", 0, 2), Engine("engine 0", 1, 2)]

    def fail():
        raise ValueError("layer 'q' lacks 3 elements")

    with trainers(kind, tmp_path / "wire", 2) as (ranks, _):
        leases = Leases(ranks[0].source)
        for version in (0, 1):  # in a new group, then in the same group
            claimed = leases.start(publish(ranks, version), "engine 0")
            begin = time.monotonic()
            told, failed = together(
                partial(engines[0].take, claimed),
                partial(engines[1].take, claimed, at_the_last_round=fail),
            )
            assert isinstance(failed, ValueError), failed
            assert isinstance(
                told, TransferFailed
            ) and "engine 0 (rank 1) did not receive all slices" in str(told)
            again = leases.start(claimed, "engine 0")
            held = together(*(partial(engine.take, again) for engine in engines))
            assert held[0] == held[1] and isinstance(held[0], dict), held
            assert time.monotonic() - begin < 10
            for engine in engines:
                check(engine, version)
            leases.release()
            settle(ranks)


def test_a_retry_after_the_trainer_has_stepped_hears_that_its_version_is_gone(tmp_path, kind):
    """The trainer has sent everything and goes on; the next version is transferred as ever."""
    engines = [Engine("engine 0", 0, 2), Engine("engine 0", 1, 2)]

    def fail():
        raise WireFailed("the connection broke")

    with trainers(kind, tmp_path / "wire", 1) as (ranks, _):
        leases = Leases(ranks[0].source)
        claimed = leases.start(publish(ranks, 0), "engine 0")
        together(
            partial(engines[0].take, claimed),
            partial(engines[1].take, claimed, at_the_last_round=fail),
        )
        settle(ranks)
        assert leases.start(claimed, "engine 0") is None
        assert ranks[0].source.leases.report.refusal == f"version 0 {GONE}"
        leases.release()
        claimed = leases.start(publish(ranks, 1), "engine 0")
        together(*(partial(engine.take, claimed) for engine in engines))
        for engine in engines:
            check(engine, 1)
        leases.release()


def test_who_has_come_hears_at_once_that_another_will_not(tmp_path, kind):
    engine = Engine("engine 0", 0, 1)
    with trainers(kind, tmp_path / "wire", 1) as (ranks, _):
        leases = Leases(ranks[0].source)
        published = publish(ranks, 0)
        claimed = leases.start(published, "engine 0", "engine 1")
        begin = time.monotonic()
        [failed] = together(
            lambda: engine.take(
                claimed, arriving=threading.Timer(0.1, leases.abandon, [claimed]).start
            )
        )
        assert isinstance(failed, TransferFailed) and ELSEWHERE in str(failed)
        assert time.monotonic() - begin < 10
        leases.release()
        # Do not wait for transfers that never began: rank 0 may report later than the engine.
        settle(ranks)
        while not ranks[0].takes:
            assert time.monotonic() - begin < 10
            time.sleep(0.001)
        assert [(error, version) for version, error, _ in ranks[0].takes] == [
            ("engine 1 (rank 0) did not arrive before the transfer was given up", 0)
        ]


def test_an_engine_that_does_not_come_ends_the_take_by_its_name(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("ORRERY_DEADLINE_SCALE", "0.005")
    engine = Engine("engine 0", 0, 1)
    with trainers(kind, tmp_path / "wire", 1) as (ranks, _):
        leases = Leases(ranks[0].source)
        published = publish(ranks, 0)
        claimed = leases.start(published, "engine 0", "engine 1")
        with pytest.raises(WireFailed, match=r"engine 1 \(rank 0\) did not arrive"):
            engine.take(claimed)
        leases.release()
        settle(ranks)


def test_a_take_that_comes_after_its_claim_was_given_back_reads_no_weights_that_change(
    tmp_path, monkeypatch
):
    """Between an engine's arrival and the order to send: the trainer settles and steps."""
    engine = Engine("engine 0", 0, 1)
    has_arrived, has_stepped, original = threading.Event(), threading.Event(), Coordinator._order

    def order(self, taking, members):
        has_arrived.set()
        assert has_stepped.wait(60)
        return original(self, taking, members)

    monkeypatch.setattr(Coordinator, "_order", order)
    with trainers("nccl", tmp_path / "wire", 2) as (ranks, _):
        leases = Leases(ranks[0].source)
        published = publish(ranks, 3)
        claimed = leases.start(published, "engine 0")

        def step():
            assert has_arrived.wait(60)
            leases.release()
            settle(ranks)
            for rank in ranks:
                rank.load(99)
            has_stepped.set()

        failed, stepped = together(lambda: engine.take(claimed), step)
        assert stepped is None and isinstance(failed, TransferFailed), failed
        assert not engine.got
        published = publish(ranks, 4)
        claimed = leases.start(published, "engine 0")
        assert engine.take(claimed) == published.fingerprints
        leases.release()
        settle(ranks)  # the engine may have all before the trainer has heard so
        assert [(version, bool(error)) for version, error, _ in ranks[0].takes] == [
            (3, True),
            (4, False),
        ]


def test_a_take_that_has_begun_keeps_the_step_waiting_though_its_claim_is_given_back(
    tmp_path, monkeypatch
):
    engine = Engine("engine 0", 0, 1)
    is_sending, may_send, original = threading.Event(), threading.Event(), _SendLoop._carry_out

    def carry_out(self, order):
        is_sending.set()
        assert may_send.wait(60)
        return original(self, order)

    monkeypatch.setattr(_SendLoop, "_carry_out", carry_out)
    with trainers("nccl", tmp_path / "wire", 2) as (ranks, _):
        leases = Leases(ranks[0].source)
        published = publish(ranks, 3)
        claimed = leases.start(published, "engine 0")
        taking = threading.Thread(
            target=together, args=(lambda: engine.take(claimed),), daemon=True
        )
        taking.start()
        assert is_sending.wait(60)
        leases.release()
        settling = threading.Thread(target=settle, args=(ranks,), daemon=True)
        settling.start()
        settling.join(0.3)
        assert settling.is_alive()
        may_send.set()
        settling.join(60)
        taking.join(60)
        assert not settling.is_alive() and not taking.is_alive()
        check(engine, 3)


def test_updates_leave_nothing_behind_in_store_and_folder(tmp_path, kind):
    engines = [Engine("engine 0", 0, 2), Engine("engine 0", 1, 2)]
    seen = []
    with trainers(kind, tmp_path / "wire", 2) as (ranks, _):
        leases = Leases(ranks[0].source)
        for version in range(3):
            claimed = leases.start(publish(ranks, version), "engine 0")
            for held in together(*(partial(engine.take, claimed) for engine in engines)):
                assert isinstance(held, dict), held
            leases.release()
            settle(ranks)
            seen.append(
                (
                    ranks[0].source._server.num_keys(),
                    sorted(path.name for path in (tmp_path / "wire").iterdir()),
                )
            )
    assert seen[1] == seen[2]


def test_a_bit_that_flips_in_a_bucket_shows_in_the_fingerprint_of_its_tensor_alone(tmp_path, kind):
    engine = Engine("engine 0", 0, 1)
    with trainers(kind, tmp_path / "wire", 2) as (ranks, _):
        leases = Leases(ranks[0].source)
        published = publish(ranks, 0)
        claimed = leases.start(published, "engine 0")
        original, flipped = WeightReceiver._await_round, []

        def damaged(self, index, parts):
            bucket = original(self, index, parts)
            for name, _, offset in self._rounds[index].slices:
                if name == "expert.2.up" and not flipped:
                    bucket[offset + 5] ^= 1
                    flipped.append(name)
            return bucket

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightReceiver, "_await_round", damaged)
            held = engine.take(claimed)
        leases.release()
        assert flipped and {
            name for name in held if held[name] != published.fingerprints[name]
        } == {"expert.2.up"}


class ConnectingForEver:
    """A process group of nccl whose peer ended while the two were connecting."""

    def send(self, *_):
        threading.Event().wait()

    recv = send


def test_a_pair_that_never_connects_ends_at_the_deadline_by_the_peers_name(monkeypatch):
    monkeypatch.setenv("ORRERY_DEADLINE_SCALE", "0.001")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    peers = object.__new__(GroupLink)
    peers._names, peers._device, peers._met, peers._group = (
        ["trainer 0", "engine 0 (rank 0)"],
        torch.device("cuda"),
        set(),
        ConnectingForEver(),
    )
    with pytest.raises(
        WireFailed,
        match=r"engine 0 \(rank 0\) did not take its slices "
        r"\(no result within 0\.06 s\)\. Read its log",
    ):
        peers.send(torch.zeros(1), 1, 0)
    with pytest.raises(WireFailed, match="trainer 0 did not send its slices"):
        peers.receive(torch.zeros(1), 0, 0)


class Opened:
    """Stands for what a link opens: says in `closed` that it was closed."""

    def __init__(self, name, closed):
        self.close = lambda: closed.append(name)


def test_what_a_link_has_opened_is_closed_where_it_cannot_be_made_whole(monkeypatch):
    closed = []
    member = SimpleNamespace(place=None)
    plan = SimpleNamespace(
        members=[member],
        holdings=[member, member],
        ranks=[],
        of_target=lambda _: [(0, {0: None, 1: None})],
    )

    def reader(_meeting, _generation, source, _own):
        if source == 1:
            raise WireFailed("trainer 1 is gone")
        return Opened(f"reader of {source}", closed)

    def offer(*_):
        raise WireFailed("the store is gone")

    monkeypatch.setattr(links, "is_shared", lambda *_: False)
    monkeypatch.setattr(links, "RegisteredBuckets", lambda *_: Opened("buckets", closed))
    monkeypatch.setattr(links, "NixlReader", reader)
    monkeypatch.setattr(links, "offer_nixl", offer)
    parts = SimpleNamespace(address=SimpleNamespace(name="s")), 1, 0, plan, [], torch.device("cpu")
    with pytest.raises(WireFailed, match="trainer 1 is gone"):
        links.make_receiver_link("nixl", *parts)
    assert closed == ["reader of 0", "buckets"]
    with pytest.raises(WireFailed, match="the store is gone"):
        links.make_sender_link("nixl", *parts)
    assert closed == ["reader of 0", "buckets", "buckets"]


def stranger_at(folder):
    """Return a stranger's connection to the store, and the wire's secret to compare."""
    address = coordinator.find_wire(folder)
    return torch.distributed.TCPStore(
        address.host, address.port, None, False, wait_for_workers=False
    ), address.secret


def test_a_stranger_at_the_store_reads_no_secret(tmp_path, kind):
    with trainers(kind, tmp_path / "wire", 2) as (ranks, _):
        leases = Leases(ranks[0].source)
        published = publish(ranks, 1)
        claimed = leases.start(published, "engine 0")
        store, secret = stranger_at(tmp_path / "wire")
        together(partial(Engine("engine 0", 0, 1).take, claimed))
        keys = [key for key in store.list_keys() if not key.startswith("init/")]
        assert keys and secret and not [key for key in keys if secret in key]
        store.set_timeout(timedelta(seconds=2))
        values = []
        for key in keys:
            with suppress(torch.distributed.DistStoreError):  # a rank removed the key meanwhile
                values.append(bytes(store.get(key)))
        assert values and not [value for value in values if secret.encode() in value]
        leases.release()
        settle(ranks)


def test_what_a_stranger_writes_into_the_store_is_refused_before_it_is_decoded(tmp_path):
    with trainers("nccl", tmp_path / "wire", 1) as ([rank], _):
        publish([rank], 1)
        store, _ = stranger_at(tmp_path / "wire")
        joined = coordinator.connect(coordinator.find_wire(tmp_path / "wire"))
        for forged in (
            b"",
            b"\xc0",
            bytes(coordinator.MAC_BYTES) + b"\xc0",
            bytes(store.get("tensors")),
            b"\x91" * 100_000,
        ):
            store.set("order/1000", forged)
            with pytest.raises(
                WireFailed, match=r"'order/1000' .* was not written by a role of this run"
            ):
                joined.order(1000)
        settle([rank])


def test_a_forged_arrival_ends_the_transfer_by_name(tmp_path):
    with trainers("nccl", tmp_path / "wire", 1) as ([rank], _):
        store, _ = stranger_at(tmp_path / "wire")
        joined = coordinator.connect(coordinator.find_wire(tmp_path / "wire"))
        joined.arrive(coordinator.Arrival(1, "engine 0", 0, 1, "m", -1))
        sealed = bytes(store.queue_pop(coordinator.ARRIVALS))
        joined.put_raw("order/1000", sealed[coordinator.MAC_BYTES :])
        for forged in (b"", bytes(store.get("order/1000"))):
            store.queue_push("other", forged)
            with pytest.raises(WireFailed, match=r"'arrivals' .* was not written by a role"):
                joined._open(coordinator.ARRIVALS, bytes(store.queue_pop("other")), "an arrival")
        settle([rank])


def test_a_forged_fingerprint_ends_the_publication_by_name(tmp_path):
    with trainers("nccl", tmp_path / "wire", 2) as (ranks, _):
        publish(ranks, 1)
        settle(ranks)
        store, _ = stranger_at(tmp_path / "wire")
        [known] = [key for key in store.list_keys() if key.endswith("holding/1")]
        store.set(known.replace("holding/1", "share/2/1"), bytes(8 * len(SHAPES)))
        [refused] = together(partial(ranks[0].publish, 2))
        assert isinstance(refused, WireFailed) and "trainer 1's fingerprints of version 2" in str(
            refused
        )
