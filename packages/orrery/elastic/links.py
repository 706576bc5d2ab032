"""Connect process i of a site to process i of every other site, over mutual TLS.

- A lost or silent connection ends the round. The first site that notices tells all others.
- Between rounds, a site's process 0 measures the speed to each new peer once.
"""

import hashlib
import logging
import queue
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Set
from enum import Enum, auto

import numpy as np

from orrery.elastic.certificates import Certificates
from orrery.elastic.connection import (
    Backlog,
    BadFrame,
    Bytes,
    Frame,
    Handshakes,
    Header,
    Kind,
    PeerConnection,
)
from orrery.elastic.routes import relay
from orrery.elastic.types import ElasticError, Epoch, LinkBroken
from orrery.runtime.timing import scaled

log = logging.getLogger(__name__)

CONNECT_S = 60.0  # limit to make all connections
PING_S = 2.0
SILENCE_S = 15.0  # silence until a peer counts as lost
RETRY_S = 0.2
QUIET_S = 1.0  # pause before a probe, because other sites may still exchange
MAX_REFUSALS = 10  # refused connections until a peer counts as dead
NOTHING = np.empty(0, np.uint8)
PROBE_S = 0.5
PROBE_BYTES = 1 << 26
FRAME = np.zeros(1 << 16, np.uint8)
ANSWER_S = 5.0
FASTEST = 4000  # cap of measured Mb/s, because CPUs limit higher speeds


class LinkPhase(Enum):
    IDLE = auto()
    BEGINNING = auto()
    RUNNING = auto()


class PeerLinks:
    """Connections to other sites. `port`: listening port of this site's process 0."""

    def __init__(
        self,
        run: str,
        certificates: Certificates,
        host: str,
        port: int = 0,
        shard: int = 0,
        num_lanes: int = 4,  # connections per peer. TCP limits the speed of each.
    ) -> None:
        """Listen on `port` + `shard` (any port if `port` is 0), unless `host` is "".

        `shard`: this process's index in the site.
        """
        self.num_lanes, self.rank, self.epoch, self.round = num_lanes, -1, -1, -1
        self._run, self._shard = hashlib.sha256(run.encode()).digest()[:16], shard
        self._members: Epoch | None = None
        self._changed = threading.Condition()
        self._peers: dict[tuple[int, int], PeerConnection] = {}
        self._early: dict[tuple[int, int, int], ssl.SSLSocket] = {}  # by epoch, rank, lane
        self._backlogs: list[Backlog] = []
        self._inboxes: list[queue.SimpleQueue[Frame | None]] = []
        self._broken: LinkBroken | None = None
        self._told: tuple[int, LinkBroken] | None = None  # a later round and its reported failure
        self._phase, self._is_closed = LinkPhase.IDLE, False
        self._dialling: set[tuple[int, int, int]] = set()  # by epoch, rank, lane
        self._probe = SpeedProbe()
        self._handshakes, self.port = Handshakes(certificates, self._met), 0
        if host:
            self.port = self._handshakes.listen(host, port + shard if port else 0) - shard

    def begin(self, epoch: Epoch, rank: int, number: int, connect_s: float = CONNECT_S) -> None:
        """Connect to all members, and wait until they begin. Raise LinkBroken if one fails."""
        with self._changed:
            if epoch.number < self.epoch or (epoch.number, number) <= (self.epoch, self.round):
                raise ElasticError(
                    f"links: round {number} of epoch {epoch.number} is over; a retry needs a new "
                    "epoch from the membership"
                )
            if epoch.number != self.epoch:
                self._close_peers()
                self.epoch, self.rank, self._members, self._told = epoch.number, rank, epoch, None
                self._backlogs = [Backlog() for _ in epoch.members]
            self.round, self._broken, self._phase = number, None, LinkPhase.BEGINNING
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
            self._phase = LinkPhase.RUNNING

    def end(self) -> None:
        """End the round. Call this once all frames have arrived."""
        assert self._members is not None
        with self._changed:
            self._phase = LinkPhase.IDLE
            is_new = {each.id for each in self._members.members} - self._probe.found.keys()
            if self._shard == 0 and len(is_new) > 1:  # `is_new` always has this site
                args, name = (self.epoch, self.round), "links-probe"
                threading.Thread(target=self._measure, args=args, name=name, daemon=True).start()

    def speeds(self) -> dict[str, int]:
        return dict(self._probe.found)

    def _measure(self, epoch: int, number: int) -> None:
        def goes_on() -> bool:
            now = (self.epoch, self.round, self._phase, self._is_closed)
            return now == (epoch, number, LinkPhase.IDLE, False)

        time.sleep(QUIET_S)
        with self._changed:
            header = self._header(Kind.PROBE, 0)
            num = len(self._members.members) if self._members else 1
            peers = sorted(self._peers.items(), key=lambda each: (each[0][0] - self.rank) % num)
        for (rank, lane), peer in peers:
            site_id = self._site_id(rank)
            if goes_on() and lane == 0 and site_id not in self._probe.found:
                self._probe.measure(site_id, peer, header, goes_on)

    def _site_id(self, rank: int) -> str:
        assert self._members is not None
        return self._members.members[rank].id

    def _is_ready(self, key: tuple[int, int]) -> bool:
        return key in self._peers and self._peers[key].ready >= self.round

    def _wanted(self) -> Iterator[tuple[int, int]]:
        assert self._members is not None
        for rank in range(len(self._members.members)):
            if rank != self.rank:
                yield from ((rank, lane) for lane in range(self.num_lanes))

    def send(self, rank: int, lane: int, hop: int, piece: int, payload: Bytes) -> int:
        """Queue a frame. Return its size. `payload` must not change until the round ends."""
        self._raise_if_broken()
        if (rank, lane) not in self._peers:
            raise self.failed(rank, "its connection is lost")
        return self._backlogs[rank].put(self._header(Kind.DATA, lane, hop, piece), payload)

    def receive(self, lane: int, timeout_s: float) -> Frame | None:
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
        """End the round, because site `rank` (perhaps this site) has failed."""
        with self._changed:
            self._fail(rank, reason)

    @property
    def current(self) -> tuple[int, int] | None:
        """Return (epoch, round), or None between rounds."""
        with self._changed:
            return None if self._phase == LinkPhase.IDLE else (self.epoch, self.round)

    def keep_leased(self, leased: Set[str], current: tuple[int, int]) -> None:
        """End round `current` if a member has no lease."""
        with self._changed:
            if self._phase == LinkPhase.IDLE or current != (self.epoch, self.round):
                return
            for rank in range(len(self._backlogs)):
                if self._site_id(rank) not in leased:
                    self._fail(rank, "its lease has ended")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            peers = list(self._peers.values())
            self._close_peers()
            early, self._early = self._early, {}
            self._changed.notify_all()
        for sock in early.values():
            sock.close()
        self._handshakes.close()
        for peer in peers:
            peer.join()

    def _header(self, kind: Kind, lane: int, hop: int = 0, piece: int = 0) -> Header:
        where = (self._run, self.epoch, self.round, self.rank, self._shard)
        return Header(*where, kind, lane, hop, piece, 0)

    def failed(self, rank: int, reason: str) -> LinkBroken:
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
        for backlog in self._backlogs:
            backlog.clear()
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
        """Return whether to keep the frame's payload. Raise BadFrame if its header is wrong."""
        with self._changed:
            due = (self.epoch, peer.rank, self._shard)
            if header.run != self._run:
                raise BadFrame("a frame of another run")
            if (found := (header.epoch, header.source, header.shard)) != due:
                raise BadFrame(f"a frame of (epoch, rank, shard) {found}, not {due}")
            if header.kind == Kind.BROKEN and header.piece >= (num := len(self._backlogs)):
                raise BadFrame(f"a report of rank {header.piece} of {num}")
            if header.kind != Kind.DATA:
                return True
            if header.lane >= self.num_lanes:
                raise BadFrame(f"a frame of lane {header.lane} of {self.num_lanes}")
            if header.round != self.round:
                raise BadFrame(f"a frame of round {header.round} in round {self.round}")
            return self._broken is None

    def arrived(self, peer: PeerConnection, header: Header, payload: Bytes) -> None:
        with self._changed:
            if header.epoch != self.epoch:
                return
            if header.kind == Kind.PROBE:
                if speed := self._probe.arrived(header, payload):
                    peer.send(self._header(Kind.PROBED, header.lane, 0, speed), NOTHING)
            elif header.kind == Kind.PROBED:
                self._probe.found[self._site_id(peer.rank)] = header.piece
            elif header.kind == Kind.READY:
                peer.ready = header.round
                self._changed.notify_all()
            elif header.kind == Kind.BROKEN and header.round >= self.round:
                reason = payload.tobytes().decode(errors="replace")
                if header.round > self.round:
                    self._told = (header.round, LinkBroken(header.piece, reason))
                elif self._phase != LinkPhase.IDLE:
                    # A site that reports its own failure has told all sites.
                    self._fail(header.piece, reason, tells=header.piece != header.source)
            elif header.kind == Kind.DATA and header.round == self.round and self._broken is None:
                frame = Frame(header.source, header.hop, header.piece, payload)
                self._inboxes[header.lane].put(frame)

    def lost(self, peer: PeerConnection, reason: str, is_bad: bool) -> None:
        with self._changed:
            if self._peers.get((peer.rank, peer.lane)) is not peer:
                return
            del self._peers[peer.rank, peer.lane]
            if is_bad:
                log.warning("links: closed the connection to rank %d: %s", peer.rank, reason)
            if self._phase == LinkPhase.RUNNING:
                self._fail(peer.rank, reason)
            self._dial_missing(time.monotonic() + scaled(CONNECT_S))

    def _dials(self, rank: int) -> bool:
        """Return whether this site dials `rank`.

        Both sites dial a relay. Otherwise the site without a listener dials, or the lower rank if
        both have one.
        """
        assert self._members is not None
        members = self._members.members
        own, other = bool(members[self.rank].port), bool(members[rank].port)
        if relay(self._members, self.rank, rank) is not None or not (own or other):
            return True
        return self.rank < rank if own and other else other

    def _dial_missing(self, end_s: float) -> None:
        if self._is_closed:
            return
        for rank, lane in self._wanted():
            key = (self.epoch, rank, lane)
            if self._dials(rank) and (rank, lane) not in self._peers and key not in self._dialling:
                self._dialling.add(key)
                args, name = (*key, end_s), f"links-dial-{rank}.{lane}"
                threading.Thread(target=self._dial, args=args, name=name, daemon=True).start()

    def _dial(self, epoch: int, rank: int, lane: int, end_s: float) -> None:
        assert self._members is not None
        over = relay(self._members, self.rank, rank)
        member = self._members.members[rank if over is None else over]
        place = (member.address, member.port + self._shard)
        refusals, reason = 0, "no connection in time"
        tls: ssl.SSLSocket | None = None
        while tls is None and time.monotonic() < end_s and refusals < MAX_REFUSALS:
            with self._changed:
                if self.epoch != epoch or self._is_closed:
                    break
                hello = self._header(Kind.HELLO, lane)
            try:
                if not member.port:
                    raise ConnectionRefusedError("no site of the pair accepts connections")
                tls = self._handshakes.dial(place, hello, rank, over is not None, end_s)
            except (OSError, ValueError) as error:
                reason = f"no connection to {member.address}:{member.port or ''} ({error})"
                refusals += isinstance(error, ConnectionRefusedError)
                time.sleep(RETRY_S)
        with self._changed:
            self._dialling.discard((epoch, rank, lane))
            if tls is not None:
                self._adopt(tls, rank, lane, epoch)
            elif self.epoch == epoch and self._phase == LinkPhase.BEGINNING:
                self._fail(rank, reason)

    def _met(self, tls: ssl.SSLSocket, hello: Header) -> None:
        if (hello.run, hello.shard) != (self._run, self._shard):
            tls.close()
            return
        with self._changed:
            if before := self._early.pop((hello.epoch, hello.source, hello.lane), None):
                before.close()
            self._early[hello.epoch, hello.source, hello.lane] = tls
            self._adopt_early()

    def _adopt_early(self) -> None:
        wanted = set(self._wanted()) if self._members else set()
        for epoch, rank, lane in [key for key in self._early if key[0] <= self.epoch]:
            tls = self._early.pop((epoch, rank, lane))
            if epoch == self.epoch and (rank, lane) in wanted and not self._dials(rank):
                try:
                    tls.sendall(self._header(Kind.HELLO, lane).pack())
                    self._adopt(tls, rank, lane, epoch)
                except OSError:
                    tls.close()
            else:
                tls.close()

    def _adopt(self, tls: ssl.SSLSocket, rank: int, lane: int, epoch: int) -> None:
        with self._changed:
            if epoch != self.epoch or self._is_closed:
                tls.close()
                return
            if before := self._peers.pop((rank, lane), None):
                before.close()
                if self._phase == LinkPhase.RUNNING:
                    self._fail(rank, "its connection was lost")
            peer = PeerConnection(tls, self, rank, lane, scaled(PING_S), self._backlogs[rank])
            self._peers[rank, lane] = peer
            if self._broken is not None:
                self._tell(peer)
            elif self._phase != LinkPhase.IDLE:
                peer.send(self._header(Kind.READY, lane), NOTHING)
            self._changed.notify_all()

    def _close_peers(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = {}


class SpeedProbe:
    """Measure speeds. `found`: Mb/s by site id.

    Receivers time a probe's second half, because TCP's slow start and buffers distort the first.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        # Sender's rank → ((epoch, round), [(arrival time, bytes) of each frame])
        self._arrivals: dict[int, tuple[tuple[int, int], list[tuple[float, int]]]] = {}

    def measure(
        self, site_id: str, peer: PeerConnection, header: Header, goes_on: Callable[[], bool]
    ) -> None:
        end_s, left = time.monotonic() + PROBE_S, PROBE_BYTES // len(FRAME)
        while goes_on() and left and time.monotonic() < end_s:
            if peer.num_queued < 2:
                peer.send(header, FRAME)
                left -= 1
            else:
                time.sleep(1e-3)
        if not goes_on():
            return
        peer.send(header._replace(hop=1), FRAME)
        end_s = time.monotonic() + ANSWER_S
        while goes_on() and site_id not in self.found and time.monotonic() < end_s:
            time.sleep(1e-2)

    def arrived(self, header: Header, payload: Bytes) -> int | None:
        now_s, at = time.monotonic(), (header.epoch, header.round)
        begun_at, found = self._arrivals.get(header.source, (at, []))
        if begun_at != at:  # the measurement was interrupted
            found = []
        self._arrivals[header.source] = at, found
        found.append((now_s, len(payload)))
        if header.hop == 0:
            return None
        del self._arrivals[header.source]
        middle_s = (found[0][0] + now_s) / 2
        begin_s = max(at_s for at_s, _ in found if at_s <= middle_s)
        seconds = max(now_s - begin_s, 1e-6)
        bits = 8 * sum(size for at_s, size in found if at_s > begin_s)
        return max(1, min(FASTEST, round(bits / seconds / 1e6)))
