"""Leases over the control socket: lost, late, repeated and forged messages, and restarts."""

import asyncio
import threading
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from orrery.wire.sockets import ControlSocket, authenticate
from orrery.wire.weight_wire import leases as module
from orrery.wire.weight_wire.leases import (
    GONE,
    LeaseClient,
    LeaseListener,
    LeaseReport,
    LeaseRequest,
    LeaseTable,
    Published,
    WireFailed,
)

pytestmark = pytest.mark.timeout(60)
TOKEN = "5f0e7a3cb1d94e2aa6c8d0b7e9f1a2c3"


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setattr("orrery.runtime.network._token", TOKEN)
    monkeypatch.setattr(module, "REPEAT_S", 0.05)


def published(version=3):
    return Published(version, "/wire", {"a": 1}, "digest")


def table_at(version=3):
    table = LeaseTable()
    table.open(version)
    return table


@contextmanager
def trainer(url, table):
    listener = LeaseListener(url, table.apply, table.report)
    try:
        yield table
        assert listener.failure is None
    finally:
        listener.close()


@contextmanager
def orchestrator(port=0):
    socket = ControlSocket("127.0.0.1", port)
    try:
        client = LeaseClient.over(socket)
        socket.start()
        yield client, socket
    finally:
        socket.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def stepping(table, version=3):
    """Return the thread of a trainer that wants to step."""
    thread = threading.Thread(target=table.settle, args=(version, 20, lambda: None), daemon=True)
    thread.start()
    return thread


async def test_a_version_is_leased_transferred_twice_and_released():
    with orchestrator() as (client, socket), trainer(socket.url, table_at()) as table:
        first = await client.start_transfer(published(), ["engine 0", "engine 1"])
        assert table.transfer(first.transfer).engines == ("engine 0", "engine 1")
        step = stepping(table)
        client.abandon(first)
        await until(lambda: table.transfer(first.transfer) is None)
        again = await client.start_transfer(first, ["engine 0"])
        assert again.transfer > first.transfer
        assert table.transfer(again.transfer).engines == ("engine 0",)
        client.abandon(first)  # late: it is over, and the next one goes on
        await asyncio.sleep(0.1)
        assert table.transfer(again.transfer) is not None and step.is_alive()
        client.release()
        await until(lambda: not step.is_alive())
        assert await client.start_transfer(published(), ["engine 0"]) is None
        assert table.report.refusal == f"version 3 {GONE}"


def test_a_lease_is_refused_once_the_trainer_wants_to_step_and_renewed_until_then():
    table, request = table_at(), LeaseRequest("a", 1, 3, ("engine 0",))
    assert table.apply(request).transfer == 1
    step = stepping(table)
    while table._is_accepting:
        pass
    assert table.apply(LeaseRequest("a", 2, 3, ("engine 0",))).transfer == 2, "held"
    assert table.apply(LeaseRequest("b", 1, 3, ("engine 0",))).refusal, "another's, and too late"
    step.join(20)
    assert not step.is_alive()


def test_a_step_waits_for_a_transfer_in_progress_though_its_lease_is_released():
    table = table_at()
    transfer = table.transfer(table.apply(LeaseRequest("a", 1, 3, ("engine 0",))).transfer)
    assert table.admit(transfer) == ""
    table.apply(LeaseRequest("a", 2))
    step = stepping(table)
    step.join(0.3)
    assert step.is_alive()
    table.finish(transfer.number, is_sent=True)
    step.join(20)
    assert not step.is_alive()
    assert table.admit(transfer) == f"version 3 {GONE}"


def test_a_step_waits_for_no_lease_that_was_sent():
    table = table_at()
    transfer = table.transfer(table.apply(LeaseRequest("a", 1, 3, ("engine 0",))).transfer)
    assert table.admit(transfer) == ""
    table.finish(transfer.number, is_sent=True)
    table.settle(3, 20, lambda: None)


def test_a_lease_that_is_never_released_ends_the_step_by_name():
    table = table_at()
    table.apply(LeaseRequest("a", 1, 3, ("engine 0",)))
    says = r"version 3 is still leased after 0\.1 s\. Read logs/orchestrator\.0\.log"
    with pytest.raises(WireFailed, match=says):
        table.settle(3, 0.1, lambda: None)


def test_repeated_and_late_requests_change_nothing():
    table = table_at()
    lease, release = LeaseRequest("a", 1, 3, ("engine 0",)), LeaseRequest("a", 2)
    assert table.apply(lease) == table.apply(lease) == LeaseReport("a", 1, 1)
    assert table.apply(release) == table.apply(lease) == table.apply(release)
    assert table.report == LeaseReport("a", 2) and table.transfer(1) is None
    table.settle(3, 20, lambda: None)


async def test_lost_messages_are_sent_again():
    with orchestrator() as (client, socket), trainer(socket.url, table_at()) as table:
        await until(lambda: client._send is not None and table.report.session)
        send, lost = client._send, []

        def lose(request):  # each the first time
            if lost and lost[-1] == request:
                send(request)
            lost.append(request)

        client._send = lose
        leased = await client.start_transfer(published(), ["engine 0"])
        assert leased.transfer and len(lost) > 1
        client.release()
        await until(lambda: table.report.number == client._request.number)
        table.settle(3, 20, lambda: None)


async def test_a_trainer_that_starts_again_with_a_lease_held_grants_the_next():
    with orchestrator() as (client, socket):
        with trainer(socket.url, table_at()):
            assert (await client.start_transfer(published(), ["engine 0"])).transfer
        with trainer(socket.url, table_at(7)) as again:  # it has resumed elsewhere
            await until(lambda: again.report.number == client._request.number)
            assert again.report.refusal == f"version 3 {GONE}"
            client.release()
            leased = await client.start_transfer(published(7), ["engine 0"])
            assert again.transfer(leased.transfer).engines == ("engine 0",)
            client.release()
            await until(lambda: not again.report.transfer)
            again.settle(7, 20, lambda: None)


async def test_an_orchestrator_that_starts_again_ends_the_leases_of_the_one_before():
    with orchestrator() as (client, socket):
        port, table = int(socket.url.rpartition(":")[2]), table_at()
        running = trainer(socket.url, table)
        running.__enter__()
        first = await client.start_transfer(published(), ["engine 0"])
    step = stepping(table)
    await asyncio.sleep(0.2)
    assert step.is_alive(), "nobody has released it"
    with orchestrator(port) as (client, _):
        await until(lambda: not step.is_alive())
        assert table.transfer(first.transfer) is None
        table.open(4)
        again = await client.start_transfer(published(4), ["engine 0"])
        assert again.transfer > first.transfer
        client.release()
        await until(lambda: not table.report.transfer)
        running.__exit__(None, None, None)


async def test_a_trainer_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(module, "LEASE_S", 0.1)

    with orchestrator() as (client, _):
        says = r"trainer 0 did not answer the lease of version 3 within"
        with pytest.raises(WireFailed, match=says):
            await client.start_transfer(published(), ["engine 0"])


@pytest.mark.parametrize("has_token", [False, True])
async def test_a_forged_report_grants_nothing(has_token):
    """A peer without the token never gets in. One with it may only repeat what is known."""
    with orchestrator() as (client, socket), trainer(socket.url, table_at()) as table:
        context = zmq.Context()
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        if has_token:
            authenticate(peer, is_sender=False)
        peer.connect(socket.url)
        try:
            if has_token:
                for content in (b"", b"\xc1", b"\x91" * 3000, b"\x81\xa4type\xa6leased"):
                    peer.send(content)
                peer.send(msgspec.msgpack.encode(LeaseReport("forged", 99, 99)))
            else:
                forged = LeaseReport(client._request.session, 1, 99)
                peer.send(msgspec.msgpack.encode(forged), zmq.NOBLOCK)
            await until(lambda: socket.num_foreign)
            leased = await client.start_transfer(published(), ["engine 0"])
            assert leased.transfer == table.report.transfer == 1
        finally:
            context.destroy(linger=0)


def test_a_forged_request_releases_nothing():
    """A program that listens in the orchestrator's place, without the token."""
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    table = table_at()
    assert table.apply(LeaseRequest("a", 1, 3, ("engine 0",))).transfer == 1
    try:
        with trainer(f"tcp://127.0.0.1:{port}", table):
            assert not impostor.poll(500), "a report reached it"
        assert table.report == LeaseReport("a", 1, 1)
    finally:
        context.destroy(linger=0)
