"""Connections of one rank to the same rank of every other site: mutual TLS, framed, in lanes.

- Every frame starts with its run, epoch and round. They are checked before the payload is read. A
  frame of another epoch, round or run breaks the connection.
- In a pair the lower rank dials. A lane is one connection with a reader and a sender thread.
- `begin` waits until both ends of every connection are in the round. Until then, and after `end`,
  a lost connection is made again, and no other site hears of it.
- In between it breaks the round, and so does silence: idle connections carry a ping every PING_S.
  The first rank that notices tells all others. It also tells those that connect later.
"""

import contextlib
import hashlib
import logging
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from enum import Enum, auto

import numpy as np

from orrery.elastic.certificates import Certificates
from orrery.elastic.connection import BadFrame, Bytes, Frame, Header, Kind, PeerConnection
from orrery.elastic.types import ElasticError, Epoch, LinkBroken
from orrery.runtime.timing import scaled

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0  # scaled, like the next three
CONNECT_S = 60.0
PING_S = 2.0
SILENCE_S = 15.0
RETRY_S = 0.2
MAX_REFUSALS = 10  # a site listens before it joins, so a refusing port belongs to a dead process
MAX_STRANGERS = 32  # connections in their handshake
CONGESTION = b"bbr"  # keeps its rate under random loss


NOTHING = np.empty(0, np.uint8)


class Phase(Enum):
    IDLE = auto()
    BEGINNING = auto()
    RUNNING = auto()


class PeerLinks:
    """Listens from its construction. `port` is the listener's port."""

    def __init__(
        self,
        run: str,
        certificates: Certificates,
        host: str,
        port: int = 0,
        shard: int = 0,
        num_lanes: int = 2,
    ) -> None:
        """Listen on `port` + `shard`, or on any port if `port` is 0.

        `shard` is the rank in the site. Raise ElasticError if the port is taken.
        """
        self.num_lanes, self.rank, self.epoch, self.round = num_lanes, -1, -1, -1
        self._run, self._shard = hashlib.sha256(run.encode()).digest()[:16], shard
        self._server, self._client = certificates.server(), certificates.client()
        self._members: Epoch | None = None
        self._changed = threading.Condition()
        self._peers: dict[tuple[int, int], PeerConnection] = {}
        self._early: dict[tuple[int, int, int], ssl.SSLSocket] = {}  # by epoch, rank, lane
        self._inboxes: list[queue.SimpleQueue[Frame | None]] = []
        self._broken: LinkBroken | None = None  # of the round, until the next
        self._told: tuple[int, LinkBroken] | None = None  # of a later round
        self._phase, self._is_closed = Phase.IDLE, False
        self._dialling: set[tuple[int, int, int]] = set()  # by epoch, rank, lane
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        try:
            self._listener = socket.create_server((host, port + shard if port else 0))
        except OSError as error:
            raise ElasticError(
                f"trainer.elastic: cannot listen on {host}:{port + shard} ({error.strerror}); "
                "choose a free port"
            ) from error
        self.port = self._listener.getsockname()[1] - shard
        threading.Thread(target=self._accept, name="links-accept", daemon=True).start()

    # Epochs and rounds

    def begin(self, epoch: Epoch, rank: int, number: int, connect_s: float = CONNECT_S) -> None:
        """Start round `number`, and connect to all members first. Raise LinkBroken if one fails."""
        with self._changed:
            if epoch.number < self.epoch or (epoch.number, number) <= (self.epoch, self.round):
                raise ElasticError(
                    f"links: round {number} of epoch {epoch.number} is over; a retry needs a new "
                    "epoch from the membership"
                )
            if epoch.number != self.epoch:
                self._close_peers()
                self.epoch, self.rank, self._members, self._told = epoch.number, rank, epoch, None
            self.round, self._broken, self._phase = number, None, Phase.BEGINNING
            self._inboxes = [queue.SimpleQueue() for _ in range(self.num_lanes)]
            self._adopt_early()
            for (_, lane), peer in self._peers.items():
                peer.send(self._header(Kind.READY, lane), NOTHING)
            if self._told is not None and self._told[0] == number:
                self._fail(self._told[1].rank, self._told[1].reason)
            end_s = time.monotonic() + scaled(connect_s)
            self._dial_missing(end_s)
            while missing := [key for key in self._wanted() if not self._is_ready(key)]:
                self._raise_if_broken()
                self._check_silence()
                if (left_s := end_s - time.monotonic()) <= 0:
                    raise self.failed(missing[0][0], "no connection in time")
                self._changed.wait(min(left_s, PING_S))
            self._raise_if_broken()
            self._phase = Phase.RUNNING

    def end(self) -> None:
        """End the round: this rank has all of its frames."""
        with self._changed:
            self._phase = Phase.IDLE

    def _is_ready(self, key: tuple[int, int]) -> bool:
        return key in self._peers and self._peers[key].ready >= self.round

    def _wanted(self) -> Iterator[tuple[int, int]]:
        assert self._members is not None
        for rank in range(len(self._members.members)):
            if rank != self.rank:
                yield from ((rank, lane) for lane in range(self.num_lanes))

    # Frames

    def send(self, rank: int, lane: int, hop: int, piece: int, payload: Bytes) -> int:
        """Queue a frame, and return its bytes. `payload` must not change until the round ends."""
        self._raise_if_broken()
        peer = self._peers.get((rank, lane))
        if peer is None:
            raise self.failed(rank, "its connection is lost")
        return peer.send(self._header(Kind.DATA, lane, hop, piece), payload)

    def receive(self, lane: int, timeout_s: float) -> Frame | None:
        """Return the lane's next frame from any peer, or None after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while True:
            self._raise_if_broken()
            left_s = end_s - time.monotonic()
            try:
                frame = self._inboxes[lane].get(left_s > 0, max(0.0, min(left_s, PING_S)))
            except queue.Empty:
                if left_s <= 0:
                    return None
                self._check_silence()
                continue
            if frame is not None:
                return frame

    def fail(self, rank: int, reason: str) -> None:
        """Break the round: a peer is known to be dead, or this rank (its own) cannot go on."""
        with self._changed:
            self._fail(rank, reason)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            peers = list(self._peers.values())
            self._close_peers()
            early, self._early = self._early, {}
            self._changed.notify_all()
        for sock in early.values():
            sock.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in peers:
            peer.join()

    def _header(self, kind: Kind, lane: int, hop: int = 0, piece: int = 0) -> Header:
        where = (self._run, self.epoch, self.round, self.rank, self._shard)
        return Header(*where, kind, lane, hop, piece, 0)

    # Failure

    def failed(self, rank: int, reason: str) -> LinkBroken:
        """Break the round as `fail` does, and return the error to raise."""
        self.fail(rank, reason)
        assert self._broken is not None
        return LinkBroken(self._broken.rank, self._broken.reason)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise LinkBroken(self._broken.rank, self._broken.reason)

    def _fail(self, rank: int, reason: str, tells: bool = True) -> None:
        if self._broken is not None:
            return
        self._broken = LinkBroken(rank, reason)
        for (_, lane), peer in self._peers.items():
            peer.drop_queued()
            if lane == 0 and tells:
                self._tell(peer)
        for inbox in self._inboxes:
            inbox.put(None)
        self._changed.notify_all()

    def _tell(self, peer: PeerConnection) -> None:
        assert self._broken is not None
        rank = self._broken.rank if self._broken.rank != peer.rank else self.rank
        said = np.frombuffer(self._broken.reason.encode(), np.uint8)
        peer.send(self._header(Kind.BROKEN, peer.lane, 0, rank), said, urgent=True)

    def _check_silence(self) -> None:
        limit_s, now_s = scaled(SILENCE_S), time.monotonic()
        silent = [(peer.heard_s, peer.rank) for peer in list(self._peers.values())]
        heard_s, rank = min(silent, default=(now_s, -1))
        if now_s - heard_s > limit_s:
            raise self.failed(rank, f"silent for {now_s - heard_s:.0f} s")

    # Called by the connections' threads

    def ping(self, lane: int) -> Header:
        return self._header(Kind.PING, lane)

    def admit(self, peer: PeerConnection, header: Header) -> bool:
        """Return whether to keep the payload that follows. Raise BadFrame."""
        with self._changed:
            mine = (self._run, self.epoch, peer.rank, self._shard, peer.lane)
            if (header.run, header.epoch, header.source, header.shard, header.lane) != mine:
                raise BadFrame(f"a frame of epoch {header.epoch} in epoch {self.epoch}")
            if header.kind != Kind.DATA:
                return True
            if header.round != self.round:
                raise BadFrame(f"a frame of round {header.round} in round {self.round}")
            return self._broken is None

    def arrived(self, peer: PeerConnection, header: Header, payload: Bytes) -> None:
        with self._changed:
            if header.epoch != self.epoch:
                return
            if header.kind == Kind.READY:
                peer.ready = header.round
                self._changed.notify_all()
            elif header.kind == Kind.BROKEN and header.round >= self.round:
                reason = payload.tobytes().decode(errors="replace")
                if header.round > self.round:
                    self._told = (header.round, LinkBroken(header.piece, reason))
                elif self._phase != Phase.IDLE:
                    # A site that has lost this one tells the others itself.
                    self._fail(header.piece, reason, tells=header.piece != header.source)
            elif header.kind == Kind.DATA and header.round == self.round and self._broken is None:
                frame = Frame(header.source, header.hop, header.piece, payload)
                self._inboxes[header.lane].put(frame)

    def lost(self, peer: PeerConnection, reason: str, is_bad: bool) -> None:
        """Forget a connection that ended. It breaks a round that has begun."""
        with self._changed:
            if self._peers.get((peer.rank, peer.lane)) is not peer:
                return
            del self._peers[peer.rank, peer.lane]
            if is_bad:
                log.warning("links: closed the connection to rank %d: %s", peer.rank, reason)
            if self._phase == Phase.RUNNING:
                self._fail(peer.rank, reason)
            self._dial_missing(time.monotonic() + scaled(CONNECT_S))

    # Connections

    def _dial_missing(self, end_s: float) -> None:
        if self._is_closed:
            return
        for rank, lane in self._wanted():
            key = (self.epoch, rank, lane)
            if rank > self.rank and (rank, lane) not in self._peers and key not in self._dialling:
                self._dialling.add(key)
                name = f"links-dial-{rank}.{lane}"
                threading.Thread(
                    target=self._dial, args=(*key, end_s), name=name, daemon=True
                ).start()

    def _dial(self, epoch: int, rank: int, lane: int, end_s: float) -> None:
        assert self._members is not None
        member, refusals, reason = self._members.members[rank], 0, "no connection in time"
        tls: ssl.SSLSocket | None = None
        while tls is None and time.monotonic() < end_s and refusals < MAX_REFUSALS:
            if self.epoch != epoch or self._is_closed:
                break
            try:
                tls = self._dialled((member.address, member.port + self._shard), lane, end_s)
            except OSError as error:
                reason = f"no connection to {member.address}:{member.port} ({error})"
                refusals += isinstance(error, ConnectionRefusedError)
                time.sleep(RETRY_S)
        with self._changed:
            self._dialling.discard((epoch, rank, lane))
            if tls is not None:
                self._adopt(tls, rank, lane, epoch)
            elif self.epoch == epoch and self._phase == Phase.BEGINNING:
                self._fail(rank, reason)

    def _dialled(self, place: tuple[str, int], lane: int, end_s: float) -> ssl.SSLSocket:
        sock = socket.create_connection(place, scaled(HANDSHAKE_S))
        tls = _wrapped(sock, self._client, is_server=False)
        try:
            tls.sendall(self._header(Kind.HELLO, lane).pack())
            tls.settimeout(max(1.0, end_s - time.monotonic()))  # the peer may begin later
            answer = Header.read(tls)
            if answer is None or answer.kind != Kind.HELLO:
                raise ConnectionResetError("closed in its handshake")
        except BaseException:
            tls.close()
            raise
        return tls

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(
                target=self._meet, args=(sock,), name="links-meet", daemon=True
            ).start()

    def _meet(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(scaled(HANDSHAKE_S))
            tls = _wrapped(sock, self._server, is_server=True)
            hello = Header.read(tls)
        except OSError as error:
            log.info("links: turned away a connection: %s", error)
            sock.close()
            return
        finally:
            self._strangers.release()
        if hello is None or (hello.run, hello.shard, hello.kind) != (
            *(self._run, self._shard),
            Kind.HELLO,
        ):
            tls.close()
            return
        with self._changed:
            before = self._early.pop((hello.epoch, hello.source, hello.lane), None)
            if before is not None:
                before.close()
            self._early[hello.epoch, hello.source, hello.lane] = tls
            self._adopt_early()

    def _adopt_early(self) -> None:
        """Use connections of this epoch, and close older ones."""
        wanted = set(self._wanted()) if self._members else set()
        for key in [key for key in self._early if key[0] <= self.epoch]:
            epoch, rank, lane = key
            tls = self._early.pop(key)
            if epoch == self.epoch and (rank, lane) in wanted and rank < self.rank:
                with contextlib.suppress(OSError):
                    tls.sendall(self._header(Kind.HELLO, lane).pack())
                    self._adopt(tls, rank, lane, epoch)
            else:
                tls.close()

    def _adopt(self, tls: ssl.SSLSocket, rank: int, lane: int, epoch: int) -> None:
        with self._changed:
            if epoch != self.epoch or self._is_closed:
                tls.close()
                return
            if before := self._peers.pop((rank, lane), None):
                before.close()
                if self._phase == Phase.RUNNING:
                    self._fail(rank, "its connection was lost")
            peer = PeerConnection(tls, self, rank, lane, scaled(PING_S))
            self._peers[rank, lane] = peer
            if self._broken is not None:
                self._tell(peer)
            elif self._phase != Phase.IDLE:
                peer.send(self._header(Kind.READY, lane), NOTHING)
            self._changed.notify_all()

    def _close_peers(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = {}


def _wrapped(sock: socket.socket, context: ssl.SSLContext, is_server: bool) -> ssl.SSLSocket:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # the kernel may lack it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)
        return context.wrap_socket(sock, server_side=is_server)
    except BaseException:
        sock.close()
        raise
