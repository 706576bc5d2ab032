"""The rollout wire against peers without the token: no message of any size ends or changes it."""

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from test_wire_rollout_wire import DEADLINE_S, batch_of, check, relay_to, taken, wire_of

from orrery.manifest.errors import RunFailed
from orrery.wire import rollout_wire, sockets
from orrery.wire.rollout_wire import RolloutReceiver

pytestmark = pytest.mark.timeout(120)
TOKEN = "5f0e7a3cb1d94e2aa6c8d0b7e9f1a2c3"
NESTED = b"\x91" * 3900  # msgpack: an array in an array in an array …
ASK_WITH_NESTED_FIELD = b"\x82" + b"\xa4type" + b"\xa3ask" + b"\xa1x" + NESTED
NUM_MALFORMED = 1000


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setattr("orrery.runtime.network._token", TOKEN)


@pytest.fixture
async def wire(token):
    async with wire_of() as wire:
        yield wire


def peak_bytes() -> int:
    """Return this process's peak memory since the last call."""
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    ]
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def peer_of(url, has_token):
    """Yield a DEALER connected to `url`; it has the run's keys if `has_token`."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        if has_token:
            sockets.authenticate(dealer, is_sender=False)
        dealer.connect(url)
        yield dealer
    finally:
        context.destroy(linger=0)


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def malformed(seed: int) -> bytes:
    """Return a damaged message: random, changed, cut off, deeply nested, or with odd values."""
    rng = random.Random(seed)
    true = [
        rollout_wire.BatchAsk(rollout_wire.PROTOCOL, 0, 1, -1, 1, -1),
        rollout_wire.Acknowledgement(rollout_wire.PROTOCOL, 0, 1),
        rollout_wire.BatchHead(1, 1, 1, {"n": 1}, {"digest": "abc"}),
        rollout_wire.Refusal(1, "no"),
    ]
    message = bytearray(msgspec.msgpack.encode(rng.choice(true)))
    match rng.randrange(5):
        case 0:
            message = bytearray(rng.randbytes(rng.randrange(200)))
        case 1:
            for _ in range(rng.randrange(1, 8)):
                message[rng.randrange(len(message))] = rng.randrange(256)
        case 2:
            del message[rng.randrange(len(message)) :]
        case 3:
            message = bytearray(ASK_WITH_NESTED_FIELD[: rng.randrange(20, 3900)])
        case 4:
            odd = [
                None,
                -1,
                2**63,
                1e308,
                float("nan"),
                "é" * 50,
                b"\xff" * 50,
                [],
                {},
                [[[]]],
                True,
            ]
            fields = {"type": rng.choice(["ask", "done", "x"])} | {
                name: rng.choice(odd) for name in rollout_wire.BatchAsk.__struct_fields__
            }
            message = bytearray(msgspec.msgpack.encode(fields))
    return bytes(message)


@pytest.mark.parametrize(
    "message", [ASK_WITH_NESTED_FIELD, NESTED, b"\x80\x04\x95pickle", b"", b"\xc1" * 1000]
)
@pytest.mark.parametrize("has_token", [False, True])
async def test_one_message_of_anybodys_does_not_end_the_wire(wire, message, has_token):
    assert await wire.sender.wanted() == -1  # the sender serves
    with peer_of(wire.sender.url, has_token) as peer:
        peer.sndtimeo = 2000
        with contextlib.nullcontext() if has_token else contextlib.suppress(zmq.Again):
            await peer.send(message)  # a refused peer loses its connection, maybe before
        await until(lambda: wire.sender.num_foreign)
        await wire.sender.send(batch_of(1))
        check(*await taken(wire.receiver(), 1), batch_of(1))


async def test_neither_the_token_nor_a_key_travels():
    async with (
        wire_of() as wire,
        relay_to(int(wire.sender.url.rsplit(":", 1)[1])) as (port, passed),
    ):
        await wire.sender.send(batch_of(1))
        receiver = RolloutReceiver(f"tcp://127.0.0.1:{port}", 0)
        try:
            check(*await taken(receiver, 1), batch_of(1))
            await wire.sender.drained(DEADLINE_S)
        finally:
            receiver.close()
        [everything] = passed
        assert len(everything) > 500 and TOKEN.encode() not in everything
        secret = sockets.derived_key(f"rollout wire {rollout_wire.PROTOCOL}, sender")
        public = sockets.z85.decode(zmq.curve_public(sockets.z85.encode(secret)))
        assert not any(each in everything for each in (bytes.fromhex(TOKEN), secret, public))


async def test_who_takes_a_freed_port_learns_nothing_of_use():
    """Another program listens on an ended orchestrator's port. A receiver sends it no secret."""
    async with wire_of() as wire:
        url = wire.sender.url
    context = zmq.asyncio.Context()
    squatter = context.socket(zmq.ROUTER)
    squatter.bind(url)
    receiver = RolloutReceiver(url, 0)
    try:
        with pytest.raises(RunFailed, match="another program listens there"):
            await taken(receiver, 1)
        assert not await squatter.poll(100)
    finally:
        receiver.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("has_token", [False, True])
async def test_a_huge_message_takes_no_memory(has_token):
    stranger = f"""
import zmq
from orrery.runtime import network
from orrery.wire import sockets
network._token = {TOKEN!r}
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
if {has_token}:
    sockets.authenticate(dealer, is_sender=False)
dealer.connect(input())
dealer.sndtimeo = 2000
try:
    for _ in range(3):
        dealer.send_multipart([bytes(10 << 20)] * 20)  # 600 MB in all
    dealer.poll(2000, zmq.POLLIN)
except zmq.Again:
    print("turned away")
context.destroy(linger=0)
"""

    async with wire_of() as wire:
        assert await wire.sender.wanted() == -1
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", stranger, stdin=subprocess.PIPE, env=environment
        )
        peak_bytes()
        before_bytes = peak_bytes()
        process.stdin.write(wire.sender.url.encode() + b"\n")
        if not has_token:
            await until(lambda: wire.sender.num_foreign)
        await wire.sender.send(batch_of(1))
        check(*await taken(wire.receiver(), 1), batch_of(1))
        assert await process.wait() == 0
        assert peak_bytes() - before_bytes < 32 << 20


async def test_a_thousand_malformed_messages_of_a_role_are_ignored(wire):
    """The peer has the token, like a broken role. Requests valid by chance are answered."""
    assert await wire.sender.wanted() == -1
    messages = [malformed(seed) for seed in range(NUM_MALFORMED)]
    with peer_of(wire.sender.url, has_token=True) as peer:
        for message in messages:
            await peer.send_multipart([message] if message else [b"", b""])
        await peer.send(b"last")
        # By chance some are valid asks, of the protocol's types and this rank.
        read = [wire.sender.control.read([message]) for message in messages]
        num_true = sum(one is not None and wire.sender._is_ours(one) for one in read)
        await until(lambda: wire.sender.num_foreign >= NUM_MALFORMED - num_true + 1)
    assert num_true < NUM_MALFORMED / 10


@pytest.mark.parametrize("kind", [rollout_wire.BatchHead, rollout_wire.MicroBatchHead])
async def test_a_thousand_malformed_answers_end_a_receiver_by_a_sentence_or_are_passed_over(
    wire, monkeypatch, kind
):
    receiver = wire.receiver()
    ask = rollout_wire.BatchAsk(rollout_wire.PROTOCOL, 0, 1, -1, 1, -1)
    for seed in range(NUM_MALFORMED):
        frames = iter([zmq.Frame(malformed(seed)), None])
        monkeypatch.setattr(receiver, "_next", lambda ask, until, frames=frames: next(frames))
        with contextlib.suppress(RunFailed):
            receiver._await(ask, kind, 0.0)


async def test_a_thousand_strangers_at_the_bulk_port_get_nothing(wire):
    await wire.sender.send(batch_of(1))
    receiver = wire.receiver()
    # A ticket is out.
    await asyncio.to_thread(
        lambda: receiver._await(receiver._ask(1, 0), rollout_wire.MicroBatchHead, DEADLINE_S)
    )
    rng = random.Random(0)

    async def knock():
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.sender._bulk.port)
        with contextlib.suppress(ConnectionError):
            writer.write(
                rng.randbytes(rng.choice([sockets._KNOCK.size, sockets._KNOCK.size, 5000]))
            )
            assert await reader.read() == b""
        writer.close()

    for _ in range(NUM_MALFORMED // 50):
        await asyncio.gather(*(knock() for _ in range(50)))
    await until(lambda: wire.sender.num_foreign >= NUM_MALFORMED)
    check(*await taken(wire.receiver(), 1), batch_of(1))


async def test_half_open_connections_are_bounded_and_keep_no_rank_out(monkeypatch):
    monkeypatch.setattr(sockets, "KNOCK_S", 3600.0)

    async with wire_of() as wire:
        await wire.sender.send(batch_of(1))
        with contextlib.ExitStack() as held:
            check(*await taken(wire.receiver(), 1), batch_of(1))  # the bulk port is open
            for _ in range(3 * sockets.MAX_UNKNOWN):
                held.enter_context(socket.create_connection(("127.0.0.1", wire.sender._bulk.port)))
                await asyncio.sleep(0)
            await until(lambda: len(wire.sender._bulk._unknown) == sockets.MAX_UNKNOWN)
            await wire.sender.send(batch_of(2))
            check(*await taken(wire.receiver(), 2), batch_of(2))
            assert len(wire.sender._bulk._unknown) <= sockets.MAX_UNKNOWN


async def test_a_ticket_dies_with_its_batch(wire):
    await wire.sender.send(batch_of(1))
    receiver = wire.receiver()
    head = await asyncio.to_thread(
        lambda: receiver._await(receiver._ask(1, 0), rollout_wire.MicroBatchHead, DEADLINE_S)
    )
    into = memoryview(bytearray(head.layout.num_bytes))
    assert await asyncio.to_thread(
        sockets.fetch, "127.0.0.1", head.ticket, 0, into, DEADLINE_S
    ) == len(into)
    receiver._done(1)
    await wire.sender.drained(DEADLINE_S)
    assert (
        await asyncio.to_thread(sockets.fetch, "127.0.0.1", head.ticket, 0, into, DEADLINE_S) == 0
    )


async def test_a_receiver_takes_no_bytes_from_a_port_that_does_not_know_the_ticket():
    ticket = sockets.Ticket(0, b"k" * 32, b"a" * 32)
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        async def answer():
            connection, _ = await asyncio.to_thread(impostor.accept)
            with connection:
                connection.sendall(b"x" * 32 + b"forged")

        into = memoryview(bytearray(6))
        there = msgspec.structs.replace(ticket, port=impostor.getsockname()[1])
        reached, _ = await asyncio.gather(
            asyncio.to_thread(sockets.fetch, "127.0.0.1", there, 0, into, DEADLINE_S), answer()
        )
        assert reached == 0 and bytes(into) == bytes(6)
