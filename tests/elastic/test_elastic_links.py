"""Links: which frames are refused, and when connections are made again."""

import contextlib
import errno
import os
import socket
import threading
import time
from queue import Queue
from types import SimpleNamespace

import numpy as np
import pytest
from linked_sites import HOST, epoch, linked, together

from orrery.elastic import connection
from orrery.elastic import links as module
from orrery.elastic.certificates import make_authority, make_site
from orrery.elastic.connection import Handshakes, Header, Kind
from orrery.elastic.links import LinkPhase, PeerLinks
from orrery.elastic.types import ElasticError, LinkBroken


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder, "run")
    return make_site(folder, "site")


def payload(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def begun(links, number=0, epoch_number=1):
    members = epoch(links, epoch_number)
    results = together(len(links), lambda rank: links[rank].begin(members, rank, number))
    assert results == [None] * len(links)


def end(links):
    for each in links:
        each.end()


def test_frames_of_a_lane_arrive_over_all_connections(certificates):
    with linked(certificates, 2, num_lanes=2) as links:
        begun(links)
        for piece in range(50):
            links[0].send(1, 1, 3, piece, payload("x" * piece))
        frames = [links[1].receive(1, 10.0) for _ in range(50)]
        frames.sort(key=lambda frame: frame.piece)
        assert [(each.source, each.hop, each.piece) for each in frames] == [
            (0, 3, piece) for piece in range(50)
        ]
        assert [len(each.payload) for each in frames] == list(range(50))
        assert links[1].receive(0, 0.0) is None


def test_a_round_begins_once_all_have_begun_it(certificates):
    with linked(certificates, 2) as links:
        begun(links)
        end(links)
        first = threading.Thread(target=links[0].begin, args=(epoch(links), 0, 1), daemon=True)
        first.start()
        first.join(0.3)
        assert first.is_alive()
        links[1].begin(epoch(links), 1, 1)
        first.join(10.0)
        assert not first.is_alive()


@pytest.mark.parametrize("change", [{"round": 2}, {"epoch": 0}, {"run": b"x" * 16}, {"source": 0}])
def test_frames_of_another_round_or_epoch_and_foreign_frames_break_the_sender(certificates, change):
    with linked(certificates, 2) as links:
        begun(links, number=3)
        header = links[0]._header(Kind.DATA, 0)._replace(**change)
        if change != {"source": 0}:
            links[0]._peers[1, 0].send(header, payload("x" * 10))
        else:
            links[0]._peers[1, 0].send(header._replace(source=1), payload("x" * 10))
        with pytest.raises(LinkBroken) as broken:
            links[1].receive(0, 10.0)
        assert broken.value.rank == 0 and "sent a frame of" in broken.value.reason


def test_a_peer_that_reports_an_unknown_rank_is_lost_itself(certificates):
    with linked(certificates, 2) as links:
        begun(links)
        links[0]._peers[1, 0].send(links[0]._header(Kind.BROKEN, 0, 0, 7), payload("silent"))
        with pytest.raises(LinkBroken) as broken:
            links[1].receive(0, 10.0)
        assert broken.value.rank == 0 and "rank 7 of 2" in broken.value.reason


def test_strangers_and_older_epochs_get_nothing_and_others_go_on(certificates, tmp_path):
    make_authority(tmp_path, "run")
    stranger = make_site(tmp_path, "site")
    with linked(certificates, 2) as links:
        begun(links, epoch_number=5)
        port = links[1].port
        hello = links[0]._header(Kind.HELLO, 0)
        for context, first in (
            (stranger.client(), hello),
            (certificates.client(), hello._replace(epoch=4)),
            (certificates.client(), hello._replace(run=b"y" * 16)),
            (certificates.client(), hello._replace(kind=Kind.DATA)),
            (certificates.client(), None),
        ):
            with (
                pytest.raises(OSError),
                socket.create_connection((HOST, port), 5) as sock,
                context.wrap_socket(sock) as tls,
            ):
                tls.sendall(first.pack() if first else b"GET / HTTP/1.1\r\n" * 20)
                if not tls.recv(1):
                    raise ConnectionResetError
        links[0].send(1, 0, 0, 0, payload("fine"))
        assert links[1].receive(0, 10.0).payload.tobytes() == b"fine"


def test_a_member_without_a_lease_breaks_its_round_before_it_connects(certificates):
    with linked(certificates, 3) as links:
        found = epoch(links)
        leased = {each.id for each in found.members[:2]}

        def one(rank):
            if rank == 2:
                while links[0].current != (found.number, 0):
                    time.sleep(0.01)
                links[0].keep_leased(leased, (found.number, -1))  # read before this round
                assert links[0]._broken is None
                links[0].keep_leased(leased, links[0].current)
                return
            links[rank].begin(found, rank, 0)

        begin_s = time.monotonic()
        results = together(3, one)
        assert time.monotonic() - begin_s < 20.0  # CONNECT_S is 60 s
        for broken in results[:2]:
            assert isinstance(broken, LinkBroken) and broken.rank == 2
            assert broken.reason == "its lease has ended"


def test_strangers_of_one_address_leave_room_for_others(certificates):
    meeting = Handshakes(certificates, lambda tls, hello: tls.close())
    port = meeting.listen(HOST, 0)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            silent = socket.create_connection((HOST, port), 5, ("127.0.0.2", 0))
            stack.enter_context(silent)
        with pytest.raises(OSError), certificates.client().wrap_socket(silent):
            pass  # closed at once, as half of all handshakes are its address's
        with (
            socket.create_connection((HOST, port), 5) as sock,
            certificates.client().wrap_socket(sock) as tls,
        ):
            assert tls.version() == "TLSv1.3"
    meeting.close()


class Exhausted:
    """A listener whose first calls of `accept` find no free file descriptor."""

    def __init__(self, listener: socket.socket, num_failures: int) -> None:
        self.listener, self.left = listener, num_failures

    def fileno(self) -> int:
        return self.listener.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.listener.accept()


def test_a_site_accepts_again_once_descriptors_are_free_and_ends_when_it_is_closed(certificates):
    meeting = Handshakes(certificates, lambda tls, hello: tls.close())
    with socket.create_server((HOST, 0)) as listener:
        exhausted = Exhausted(listener, 2)
        thread = threading.Thread(target=meeting._accept, args=(exhausted,), daemon=True)
        thread.start()
        with (
            socket.create_connection((HOST, listener.getsockname()[1]), 10) as sock,
            certificates.client().wrap_socket(sock) as tls,
        ):
            tls.sendall(b"GET / HTTP/1.1\r\n" * 20)
            with contextlib.suppress(ConnectionResetError):
                assert tls.recv(1) == b""
        assert exhausted.left == 0 and thread.is_alive()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_a_connection_lost_between_rounds_breaks_no_site(certificates, num_ahead):
    """Site 2 is in the next round, or sites 1 and 2, when sites 0 and 1 lose their connection."""
    with linked(certificates, 3, num_lanes=2) as links:
        begun(links)
        end(links)
        members, lost = epoch(links), [links[0]._peers[1, 0], links[1]._peers[0, 0]]
        ahead = [2, 1][:num_ahead]
        results = Queue()
        for rank in ahead:
            begin_later(links[rank], (members, rank, 1), results)
        until(lambda: all(links[rank]._phase == LinkPhase.BEGINNING for rank in ahead))
        socket.socket.shutdown(lost[0]._tls, socket.SHUT_RDWR)  # as the network does
        until(lambda: lost[0].is_closed and lost[1].is_closed)
        for rank in {0, 1, 2} - set(ahead):
            begin_later(links[rank], (members, rank, 1), results)
        assert [results.get(timeout=20) for _ in links] == [None] * 3
        links[1].send(0, 0, 0, 0, payload("back"))
        assert links[0].receive(0, 10.0).payload.tobytes() == b"back"


def test_a_connection_lost_in_a_round_breaks_it_at_sites_that_had_not_begun(certificates):
    with linked(certificates, 3) as links:
        begun(links)
        end(links)
        members, results = epoch(links), Queue()
        for rank in (0, 1):
            begin_later(links[rank], (members, rank, 1), results)
        until(lambda: all(links[rank]._phase == LinkPhase.BEGINNING for rank in (0, 1)))
        links[0].fail(1, "its lease ended")
        assert [results.get(timeout=20).rank for _ in range(2)] == [1, 0]
        until(lambda: links[2]._told is not None)
        with pytest.raises(LinkBroken, match="rank 1: its lease ended"):
            links[2].begin(members, 2, 1)


def begin_later(links, args, results):
    def run():
        try:
            results.put(links.begin(*args))
        except LinkBroken as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()


def until(holds):
    end_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_dead_site_is_named_at_the_start_of_a_round(certificates, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    with linked(certificates, 3) as links:
        members = epoch(links)
        links[2].close()
        results = together(2, lambda rank: links[rank].begin(members, rank, 0))
        assert [each.rank for each in results] == [2, 2]


def test_a_failure_that_one_rank_reports_reaches_all(certificates):
    with linked(certificates, 3) as links:
        begun(links)
        links[0].fail(2, "its lease ended")
        for each in links[:2]:
            with pytest.raises(LinkBroken, match="rank 2: its lease ended"):
                each.receive(0, 10.0)


def test_a_round_begins_once_an_epoch(certificates):
    with linked(certificates, 2) as links:
        begun(links, number=4)
        with pytest.raises(ElasticError, match="round 4 of epoch 1 is over"):
            links[0].begin(epoch(links), 0, 4)
        begun(links, number=4, epoch_number=2)


@pytest.mark.parametrize(
    ("tuned", "most", "size"),
    [(4 << 20, 4 << 20, 8 << 20), (4 << 20, 212_992, None), (32 << 20, 64 << 20, None)],
    ids=["the kernel allows more than it gives", "Debian's limit", "wide already"],
)
def test_a_send_buffer_only_grows(tuned, most, size, tmp_path, monkeypatch):
    for name, text in (("ipv4/tcp_wmem", f"4096\t16384\t{tuned}"), ("core/wmem_max", f"{most}")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(connection, "KERNEL", tmp_path)
    told = []
    sock = SimpleNamespace(setsockopt=lambda level, option, value: told.append((option, value)))
    connection.widen(sock)
    assert told == ([(socket.SO_SNDBUF, size // 2)] if size else [])


def test_a_taken_port_is_one_sentence(certificates):
    with (
        linked(certificates, 1) as (taken,),
        pytest.raises(ElasticError, match="cannot listen on"),
    ):
        PeerLinks("run", certificates, HOST, taken.port)


def test_a_header_is_fixed_in_size():
    header = Header(b"r" * 16, 1, 2, 3, 0, Kind.DATA, 1, 2, 3, 4)
    assert Header.unpack(header.pack()) == header
