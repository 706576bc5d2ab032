"""The rollout wire: batches arrive whole, in order, at every rank, or an error says why."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import zmq
from wire_documents import documents, same

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.wire import rollout_wire
from orrery.wire.columns import Columns
from orrery.wire.packing import LazyMicroBatches
from orrery.wire.rollout_wire import Batch, RolloutReceiver, RolloutSender
from orrery.wire.routed_experts import RouteShape, check_routes, without_routes
from orrery.wire.sockets import BufferPool

pytestmark = pytest.mark.timeout(60)
DEADLINE_S = 20.0


class Wire:
    """A sender in this loop and receivers in threads."""

    def __init__(self, num_ranks: int) -> None:
        self.sender = RolloutSender("127.0.0.1", 0, num_ranks)
        self.receivers = []

    def receiver(self, rank=0):
        self.receivers.append(RolloutReceiver(self.sender.url, rank))
        return self.receivers[-1]

    def close(self):
        for receiver in self.receivers:
            receiver.close()
        self.sender.close()


@contextlib.asynccontextmanager
async def wire_of(num_ranks=1):
    wire = Wire(num_ranks)
    try:
        yield wire
    finally:
        wire.close()


@pytest.fixture
async def wire():
    async with wire_of() as wire:
        yield wire


def copied(columns: Columns) -> Columns:
    """Outlives the wire's buffers, so that reuse of a buffer would show."""
    return Columns(
        columns.offsets.copy(),
        *({n: a.copy() for n, a in c.items()} for c in (columns.token, columns.sample)),
    )


def take(receiver, step, deadline_s=DEADLINE_S):
    received = receiver.receive(step, deadline_s)
    return received, [copied(columns) for columns in received]


async def taken(receiver, step, deadline_s=DEADLINE_S):
    return await asyncio.to_thread(take, receiver, step, deadline_s)


def batch_of(step, lengths=((3, 2), (4,)), num_ranks=1):
    """Micro-batches differ by rank, step and position."""
    return Batch(
        step,
        [
            [documents(part, seed=100 * step + 10 * rank + at) for at, part in enumerate(lengths)]
            for rank in range(num_ranks)
        ],
        totals={"num_trained_tokens": 7, "weight": 0.5},
        info={"digest": "abc"},
    )


def check(received, columns, batch, rank=0):
    assert (received.step, received.rank, received.totals, received.info) == (
        batch.step,
        rank,
        batch.totals,
        batch.info,
    )
    assert received.num_micro_batches == len(columns) == len(batch.micro_batches[rank])
    for got, parts in zip(columns, batch.micro_batches[rank], strict=True):
        assert same(got, Columns.concatenate([parts] if isinstance(parts, Columns) else parts))


async def test_a_batch_arrives_as_it_was_sent(wire):
    batch = batch_of(1)
    await wire.sender.send(batch)
    check(*await taken(wire.receiver(), 1), batch)
    await wire.sender.drained(DEADLINE_S)


async def test_an_ask_before_the_batch_is_answered_when_it_is_there(wire):
    waiting = asyncio.create_task(taken(wire.receiver(), 4))
    assert await wire.sender.wanted(at_least=4) == 4
    batch = batch_of(4)
    await wire.sender.send(batch)
    check(*await waiting, batch)


async def test_nobody_has_asked_yet_says_minus_one(wire):
    assert await wire.sender.wanted() == -1


async def test_two_ranks_get_their_own_shares_over_several_steps():
    async with wire_of(num_ranks=2) as wire:
        receivers = [wire.receiver(0), wire.receiver(1)]
        for step in (1, 2, 3):
            batch = batch_of(step, num_ranks=2)
            await wire.sender.send(batch)
            for rank, (received, columns) in enumerate(
                await asyncio.gather(*(taken(r, step) for r in receivers))
            ):
                check(received, columns, batch, rank)
        await wire.sender.drained(DEADLINE_S)


async def test_ranks_that_share_micro_batches_get_the_same_ones():
    """Each two of four ranks share documents. A batch is removed once all four have it."""
    async with wire_of(num_ranks=4) as wire:
        receivers = [wire.receiver(rank) for rank in range(4)]
        for step in (1, 2):
            of_pair = batch_of(step, num_ranks=2)
            batch = Batch(
                step,
                [of_pair.micro_batches[rank // 2] for rank in range(4)],
                of_pair.totals,
                of_pair.info,
            )
            await wire.sender.send(batch)
            for rank in (3, 1, 0, 2):
                check(*await taken(receivers[rank], step), batch, rank)
        await wire.sender.drained(DEADLINE_S)


async def test_a_rank_may_run_ahead_of_the_other():
    """Rank 0 asks for batch 2 while rank 1 lacks batch 1, so batch 2 waits for room."""
    async with wire_of(num_ranks=2) as wire:
        fast, slow = wire.receiver(0), wire.receiver(1)
        first, second = batch_of(1, num_ranks=2), batch_of(2, num_ranks=2)
        await wire.sender.send(first)
        check(*await taken(fast, 1), first, 0)
        ahead = asyncio.create_task(taken(fast, 2))
        await wire.sender.wanted(at_least=2)
        handing = asyncio.create_task(wire.sender.send(second))
        check(*await taken(slow, 1), first, 1)
        await handing
        check(*await ahead, second, 0)
        check(*await taken(slow, 2), second, 1)


async def test_send_waits_until_the_batch_before_is_acknowledged(wire):
    await wire.sender.send(batch_of(1))
    handing = asyncio.create_task(wire.sender.send(batch_of(2)))
    await asyncio.wait([handing], timeout=0.1)
    assert not handing.done()
    receiver = wire.receiver()
    await taken(receiver, 1)
    await handing
    check(*await taken(receiver, 2), batch_of(2))


async def test_a_receiver_that_restarts_half_way_gets_the_whole_batch_again(wire):
    batch = batch_of(1, lengths=((3,), (4,), (5,)))
    await wire.sender.send(batch)
    first = RolloutReceiver(wire.sender.url, 0)

    def take_one():
        next(iter(first.receive(1, DEADLINE_S)))
        first.close()

    await asyncio.to_thread(take_one)
    check(*await taken(wire.receiver(), 1), batch)


async def test_a_reader_that_stops_at_the_last_micro_batch_has_acknowledged(wire):
    """Return `zip(received, steps)`. It stops the iterator at the last micro-batch."""
    batch = batch_of(1)
    await wire.sender.send(batch)
    receiver = wire.receiver()

    def take_exactly():
        received = receiver.receive(1, DEADLINE_S)
        return [next(received.micro_batches) for _ in range(received.num_micro_batches)], received

    kept, _received = await asyncio.to_thread(take_exactly)
    await wire.sender.drained(DEADLINE_S)
    for columns, parts in zip(kept, batch.micro_batches[0], strict=True):
        assert same(columns, Columns.concatenate(parts))


async def test_a_batch_that_everyone_has_is_gone_and_asking_for_it_is_refused(wire):
    receiver = wire.receiver()
    for step in (1, 2):
        await wire.sender.send(batch_of(step))
        await taken(receiver, step)
    await wire.sender.drained(DEADLINE_S)
    with pytest.raises(RunFailed, match=r"rank 0 asked.*batch 1.*removed, the newest batch is 2"):
        await taken(receiver, 1)


async def test_a_rank_that_would_skip_a_batch_is_refused(wire):
    """Ends resumed from different checkpoints never drop a batch silently."""
    refused = r"rank 0 asked.*batch 2 and was refused: batch 1 comes first"
    early = asyncio.create_task(taken(wire.receiver(), 2))
    await wire.sender.wanted(at_least=2)
    await wire.sender.send(batch_of(1))
    with pytest.raises(RunFailed, match=refused):
        await early
    with pytest.raises(RunFailed, match=refused):
        await taken(wire.receiver(), 2)
    check(*await taken(wire.receiver(), 1), batch_of(1))


async def test_steps_only_rise(wire):
    await wire.sender.send(batch_of(5))
    with pytest.raises(OrreryError, match="batch 5: the wire already took batch 5"):
        await wire.sender.send(batch_of(5))


async def test_ranks_must_have_equal_numbers_of_micro_batches():
    async with wire_of(num_ranks=2) as wire:
        uneven = Batch(1, [[documents([2])], []])
        with pytest.raises(OrreryError, match=r"batch 1: the ranks have \[1, 0\] micro-batches"):
            await wire.sender.send(uneven)


async def test_a_deadline_says_who_waited_for_what(wire):
    with pytest.raises(
        RunFailed,
        match=r"trainer rank 0 asked the orchestrator at .* for batch 3, "
        r"but got no answer within 0\.1 s",
    ):
        await taken(wire.receiver(), 3, deadline_s=0.1)
    await wire.sender.send(batch_of(3))
    with pytest.raises(RunFailed, match=r"waited 0\.1 s.*batch 3 by trainer rank 0"):
        await wire.sender.drained(0.1)


async def test_a_micro_batch_whose_documents_differ_in_columns_is_named_at_the_sender(wire):
    left, right = documents([2, 2])
    del right.token["logprob"]
    receiver = wire.receiver()
    with pytest.raises(
        OrreryError,
        match=r"micro-batch 0 of rank 0 cannot be sent: "
        r"token columns \['logprob'\] are missing in some parts",
    ):
        await wire.sender.send(Batch(1, [[[left, right]]]))
        with pytest.raises(RunFailed, match="cannot be sent"):
            await taken(receiver, 1)
        await wire.sender.wanted()


async def test_empty_micro_batches_arrive_empty(wire):
    nothing = documents([3])[0].select([])
    await wire.sender.send(Batch(1, [[[], nothing, documents([2])]]))
    _, columns = await taken(wire.receiver(), 1)
    assert [c.num_tokens for c in columns] == [0, 0, 2]
    assert columns[1].token["routed_experts"].shape == (0, 3, 2)


async def test_a_batch_without_micro_batches_arrives_and_is_acknowledged(wire):
    await wire.sender.send(Batch(1, [[]], {"n": 0}))
    received, columns = await taken(wire.receiver(), 1)
    assert columns == [] and received.totals == {"n": 0}
    await wire.sender.drained(DEADLINE_S)


async def test_frames_of_many_megabytes_arrive_whole(wire):
    rng = np.random.default_rng(1)
    sizes = [20_000, 5, 9_000]
    # 624 bytes a token, 18 MB.
    parts = [
        Columns(
            np.array([0, n]),
            {"routed_experts": rng.integers(0, 65536, (n, 39, 8), dtype=np.uint16)},
        )
        for n in sizes
    ]
    batch = Batch(1, [[parts, parts[:1]]])
    await wire.sender.send(batch)
    check(*await taken(wire.receiver(), 1), batch)


async def test_documents_with_routes_and_without_arrive_in_one_micro_batch(wire):
    shape = RouteShape(39, 8, 300)
    said = np.random.default_rng(1).integers(0, 300, (9000, 39, 8)).astype(np.uint16)
    parts = [
        Columns(np.array([0, len(each)]), {"routed_experts": each})
        for each in (said, without_routes(8000, shape), said[:3])
    ]
    await wire.sender.send(Batch(1, [[parts]]))
    _, [columns] = await taken(wire.receiver(), 1)
    _, is_missing, num_routed = check_routes(columns.token["routed_experts"], shape, "batch 1")
    assert np.array_equal(columns.token["routed_experts"][:9000], said) and num_routed == 39 * 9003
    assert np.flatnonzero(is_missing).tolist() == list(range(9000, 17000))


async def test_micro_batches_are_made_one_at_a_time_when_they_are_needed(wire):
    made = []
    lazy = LazyMicroBatches(6, lambda at: made.append(at) or documents([at + 1], seed=at))
    await wire.sender.send(Batch(1, [lazy]))
    assert made == []
    _, columns = await taken(wire.receiver(), 1)
    assert [c.num_tokens for c in columns] == [1, 2, 3, 4, 5, 6]
    assert made == list(range(6))


async def test_columns_that_the_reader_keeps_are_never_overwritten(wire):
    batch = batch_of(1, lengths=[(5,)] * 6)
    await wire.sender.send(batch)
    receiver = wire.receiver()
    kept = await asyncio.to_thread(lambda: list(receiver.receive(1, DEADLINE_S)))
    for columns, parts in zip(kept, batch.micro_batches[0], strict=True):
        assert same(columns, parts[0])


async def test_another_runs_token_gets_nothing(monkeypatch):
    monkeypatch.setattr("orrery.runtime.network._token", "ours")
    async with wire_of() as wire:
        await wire.sender.send(batch_of(1))
        monkeypatch.setattr("orrery.runtime.network._token", "theirs")
        stranger = wire.receiver()
        with pytest.raises(
            RunFailed,
            match=r"the orchestrator has the token of another attempt\. Restart the stage",
        ):
            await taken(stranger, 1, deadline_s=DEADLINE_S)
        assert await wire.sender.wanted() == -1
        assert wire.sender.num_foreign >= 1
        monkeypatch.setattr("orrery.runtime.network._token", "ours")
        check(*await taken(wire.receiver(), 1), batch_of(1))


@pytest.mark.parametrize(("given", "says"), [("ours", True), ("", False), (None, False)])
def test_a_launched_role_without_the_runs_token_neither_sends_nor_receives_nor_says_where_it_is(
    tmp_path, given, says
):
    """In launched processes the parent watch removes its variable before a wire is made."""
    code = """
import asyncio
from orrery.manifest.errors import RunFailed
from orrery.runtime.role_context import role_process
from orrery.wire import rendezvous, rollout_wire
async def sender():
    rollout_wire.RolloutSender(ctx.host, 0, 1).close()
with role_process("orchestrator") as ctx:
    def receiver():
        rollout_wire.RolloutReceiver("tcp://127.0.0.1:1", 0).close()
    for begin in (lambda: asyncio.run(sender()), receiver):
        try:
            begin()
        except RunFailed as error:
            assert "the run's token" in str(error)
        else:
            print("began")
    rendezvous.publish(ctx, "http://here")
"""
    environment = os.environ | {
        "ORRERY_LAUNCHER_PID": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    environment |= {} if given is None else {"ORRERY_TOKEN_FILE": "-"}
    role = subprocess.run(
        [sys.executable, "-c", code, "--run-dir", str(tmp_path), "--stage", "rl"],
        env=environment,
        input=given or "",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (tmp_path / "stages/rl/endpoints/orchestrator.0.json").exists() is says
    assert role.stdout.splitlines() == ["began"] * (2 if says else 0), role.stderr
    if says:
        assert role.returncode == 0, role.stderr
    else:
        assert role.returncode == 1 and role.stderr.splitlines()[-1].startswith(
            "error: the run's token: none came from the launcher"
        )


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_a_foreign_program_behind_the_url_is_said_so(answer):
    """A peer that hangs up, answers otherwise, or (None) lacks the run's keys."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))

    def reply():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(answer)

    thread = threading.Thread(target=reply)
    if answer is not None:
        thread.start()
        port = listener.getsockname()[1]
    receiver = RolloutReceiver(f"tcp://127.0.0.1:{port}", 0)
    try:
        with pytest.raises(RunFailed, match="another program listens there"):
            receiver.receive(1, DEADLINE_S)
    finally:
        receiver.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        if answer is not None:
            thread.join()
        context.destroy(linger=0)


async def test_a_port_that_is_taken_is_named(wire):
    port = int(wire.sender.url.rsplit(":", 1)[1])
    with pytest.raises(OrreryError, match=f"cannot listen on 127.0.0.1:{port}"):
        RolloutSender("127.0.0.1", port, 1)


async def test_the_sender_listens_on_loopback_only(wire):
    assert wire.sender.url.startswith("tcp://127.0.0.1:")


def test_buffers_are_reused_only_once_nobody_looks_at_them():
    pool = BufferPool()
    first = pool.take(100)
    address = first.ctypes.data
    view = first[:10].view(np.int8)
    del first
    second = pool.take(100)
    assert second.ctypes.data != address, "a view still looks at the first buffer"
    del view
    assert pool.take(80).ctypes.data == address


def test_buffers_that_torch_looks_at_are_not_reused():
    torch = pytest.importorskip("torch")
    pool = BufferPool()
    first = pool.take(64)
    address = first.ctypes.data
    tensor = torch.from_numpy(first.view(np.float32))
    del first
    assert pool.take(64).ctypes.data != address
    del tensor
    assert pool.take(64).ctypes.data == address


async def test_a_lost_acknowledgement_is_made_good_by_the_next_ask(wire):
    await wire.sender.send(batch_of(1))
    receiver = wire.receiver()
    post = receiver._send
    receiver._send = lambda message, who: (
        None if isinstance(message, rollout_wire.Acknowledgement) else post(message, who)
    )
    await taken(receiver, 1)
    receiver._send = post
    waiting = asyncio.create_task(taken(receiver, 2))
    await wire.sender.drained(DEADLINE_S)
    await wire.sender.send(batch_of(2))
    check(*await waiting, batch_of(2))


@contextlib.asynccontextmanager
async def relay_to(port, limits_bytes=()):
    """Yield (port, passed bytes) of a relay that cuts connection n after `limits_bytes[n]`."""
    passed, tasks = [], []

    async def copy(reader, writer, limit_bytes):
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                num_bytes += len(data)
                if num_bytes > limit_bytes:
                    break
                passed[-1] += data
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def connect(reader, writer):
        tasks.append(asyncio.current_task())
        limit_bytes = limits_bytes[len(passed)] if len(passed) < len(limits_bytes) else 1 << 40
        passed.append(bytearray())
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, up_writer, 1 << 40), copy(up_reader, writer, limit_bytes))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as between:
        yield between.sockets[0].getsockname()[1], passed
        if tasks:
            await asyncio.wait(tasks, timeout=DEADLINE_S)


async def test_a_connection_that_is_lost_inside_a_micro_batch_heals():
    """A relay cuts the connection; the receiver goes on from there on another."""
    async with (
        wire_of() as wire,
        relay_to(wire.sender._bulk.port, [2 << 20]) as (port, passed),
    ):
        wire.sender._bulk.port = port
        rng = np.random.default_rng(1)
        # one micro-batch of 5 MB; the relay cuts after 2 MiB
        parts = [
            Columns(
                np.array([0, 8000]),
                {"routed_experts": rng.integers(0, 65536, (8000, 39, 8), dtype=np.uint16)},
            )
        ]
        batch = Batch(1, [[parts, documents([3])]])
        await wire.sender.send(batch)
        check(*await taken(wire.receiver(), 1), batch)
        await wire.sender.drained(DEADLINE_S)
        assert len(passed) == 3 and 2 << 19 < len(passed[0]) <= 2 << 20
        assert len(passed[1]) < 4 << 20, "what had arrived is not sent again"
