"""Replace each site's weight change Δᵢ by the mean Σ wᵢΔᵢ / Σ wᵢ, bitwise equal on all W sites.

- `ring`: a sum for each of W chunks travels W − 1 hops. Each site decodes it, adds its own values
  in float32 and encodes it again. The total then travels W − 1 hops unchanged.
- `all_to_all`: each site sums one chunk over all sites and sends the sum to all.
- A site with wᵢ = 0 forwards frames but adds no values.
- Arriving sums overwrite Δᵢ, so the caller must compute Δᵢ again if a peer fails.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from orrery.elastic.codecs import Codec
from orrery.elastic.codecs.base import Bytes, Floats
from orrery.elastic.connection import Frame, Slab
from orrery.elastic.links import PeerLinks
from orrery.elastic.routes import ring_order
from orrery.elastic.types import ElasticError, LinkBroken, OuterRound

PIECE = 1 << 17  # values per frame
TIMEOUT_S = 600.0  # maximum wait for a frame


@dataclass(frozen=True)
class ExchangeStats:
    bytes_sent: int
    seconds: float
    codec_s: float  # summed over threads


class ErrorFeedback:
    """A rank's encoding errors, added to the values of its next exchange.

    Call `commit`, which copies `pending` to `lost` (both f32[n]), after each committed round.
    """

    def __init__(self, n: int) -> None:
        self.lost, self.pending = np.zeros(n, np.float32), np.zeros(n, np.float32)

    def commit(self, parts: Iterable[slice] = (slice(None),)) -> None:
        for part in parts:
            self.lost[part] = self.pending[part]


def exchange(
    delta: Floats,
    outer_round: OuterRound,
    rank: int,
    links: PeerLinks,
    codec: Codec,
    topology: str = "ring",
    *,
    error_feedback: ErrorFeedback | None = None,
    buckets: Sequence[slice] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ExchangeStats:
    """Replace `delta`, f32[n], by the weighted mean over sites, or 0 if all weights are 0.

    `buckets`: slices that cover `delta`, equal at all sites. Raise LinkBroken if a peer fails, and
    ElasticError if a value cannot be encoded.
    """
    if topology not in TOPOLOGIES:
        raise ElasticError(
            f"trainer.elastic.topology: {topology!r} is unknown; "
            f"choose from {', '.join(TOPOLOGIES)}"
        )
    begin_s, num_sites = time.monotonic(), len(outer_round.weights)
    total = sum(outer_round.weights)
    if total == 0:
        delta[:] = 0
    if total == 0 or num_sites == 1:
        return ExchangeStats(0, time.monotonic() - begin_s, 0.0)
    links.begin(outer_round.epoch, rank, outer_round.number)
    ring = list(ring_order(outer_round.epoch))
    pieces = _pieces(buckets or [slice(0, delta.size)], num_sites, links.num_lanes)
    share = np.float32(outer_round.weights[rank] / total)
    is_heavy = [weight > 0 for weight in outer_round.weights]
    if error_feedback is not None and not is_heavy[rank]:
        error_feedback.pending[:] = error_feedback.lost  # errors of unencoded values stay
    site = _Site(delta, share, is_heavy, rank, ring, links, codec, error_feedback, timeout_s)
    lanes = [
        TOPOLOGIES[topology](site, lane, {n: p for n, p in enumerate(pieces) if p.lane == lane})
        for lane in range(links.num_lanes)
    ]
    _in_threads([lane.run for lane in lanes])
    links.end()
    bytes_sent = sum(lane.bytes_sent for lane in lanes)
    codec_s = sum(lane.codec_s for lane in lanes)
    return ExchangeStats(bytes_sent, time.monotonic() - begin_s, codec_s)


def layer_buckets(sizes: Mapping[str, int]) -> list[slice]:
    """Return a slice per layer: adjacent tensors whose names have the same first number."""
    buckets: list[slice] = []
    last: object = object()
    end = 0
    for name, size in sizes.items():
        layer = next((part for part in name.split(".") if part.isdigit()), None)
        start, end = end, end + size
        if buckets and layer == last:
            start = buckets.pop().start
        buckets.append(slice(start, end))
        last = layer
    return buckets


@dataclass(frozen=True)
class _Piece:
    lane: int
    chunk: int
    at: slice


def _pieces(buckets: Iterable[slice], num_sites: int, num_lanes: int) -> list[_Piece]:
    """Cut each bucket into a chunk per site, and chunks into pieces of at most PIECE values."""
    pieces: list[_Piece] = []
    turn = -1
    for bucket in buckets:
        size = bucket.stop - bucket.start
        ends = [bucket.start + size * chunk // num_sites for chunk in range(num_sites + 1)]
        most = max((b - a for a, b in pairwise(ends)), default=0)
        for offset in range(0, most, PIECE):
            turn += 1
            for chunk in range(num_sites):
                start = ends[chunk] + offset
                stop = min(start + PIECE, ends[chunk + 1])
                if start < stop:
                    pieces.append(_Piece(turn % num_lanes, chunk, slice(start, stop)))
    return pieces


@dataclass(frozen=True)
class _Site:
    delta: Floats
    share: np.float32
    is_heavy: list[bool]
    rank: int
    ring: list[int]
    links: PeerLinks
    codec: Codec
    error_feedback: ErrorFeedback | None
    timeout_s: float


class _Lane(ABC):
    def __init__(self, site: _Site, lane: int, pieces: dict[int, _Piece]) -> None:
        self.site, self.lane, self.pieces = site, lane, pieces
        self.bytes_sent, self.codec_s = 0, 0.0
        self._slab = Slab()
        self.awaited: set[tuple[int, int, int]] = set()  # (source, hop, piece)
        self._scratch = np.empty(max((_size(each) for each in pieces.values()), default=0), "f4")

    @abstractmethod
    def first(self) -> Iterator[None]:
        """Send frames that need no received data. Yield after each."""

    @abstractmethod
    def take(self, frame: Frame) -> None: ...

    def run(self) -> None:
        try:
            self._run()
        except LinkBroken:
            raise
        except BaseException as error:
            self.site.links.fail(self.site.rank, str(error) or type(error).__name__)
            raise

    def _run(self) -> None:
        links, to_send = self.site.links, self.first()
        is_sending = True
        while is_sending or self.awaited:
            frame = links.receive(self.lane, 0.0 if is_sending else self.site.timeout_s)
            if frame is not None:
                self._checked(frame)
                self.take(frame)
            elif is_sending:
                is_sending = next(to_send, self) is not self
            else:
                source, _, _ = next(iter(self.awaited))
                raise links.failed(source, f"sent no frame for {self.site.timeout_s:g} s")

    def _checked(self, frame: Frame) -> None:
        key = (frame.source, frame.hop, frame.piece)
        if key not in self.awaited:
            raise self.site.links.failed(frame.source, f"sent an unexpected frame {key}")
        self.awaited.remove(key)
        size = _size(self.pieces[frame.piece])
        if len(frame.payload) != self.site.codec.wire_bytes(size):
            reason = f"sent {len(frame.payload)} bytes for {size} values of {self.site.codec.kind}"
            raise self.site.links.failed(frame.source, reason)

    def send(self, rank: int, hop: int, number: int, wire: Bytes) -> None:
        self.bytes_sent += self.site.links.send(rank, self.lane, hop, number, wire)

    def own(self, number: int) -> Floats:
        """Return a piece of this site's weighted update. The next call overwrites it."""
        piece = self.pieces[number]
        out = self._scratch[: _size(piece)]
        if self.site.share == 0:
            out[:] = 0  # because 0 · NaN is NaN
            return out
        return np.multiply(self.site.delta[piece.at], self.site.share, out=out)

    def contribute(self, number: int, added: Bytes | None = None) -> Bytes:
        if self.site.error_feedback is not None and self.site.share > 0:
            values = self.own(number)
            if added is not None:
                self.add(added, values)
            return self.encode(number, values)
        begin_s, codec = time.monotonic(), self.site.codec
        x = self.site.delta[self.pieces[number].at]
        out = self._slab.take(codec.wire_bytes(x.size))
        wire = codec.encode_sum(x, float(self.site.share), added, out)
        self.codec_s += time.monotonic() - begin_s
        return wire

    def finish(self, number: int, wire: Bytes) -> None:
        begin_s = time.monotonic()
        self.site.codec.decode(wire, self.site.delta[self.pieces[number].at])
        self.codec_s += time.monotonic() - begin_s

    def add(self, wire: Bytes, out: Floats) -> None:
        begin_s = time.monotonic()
        self.site.codec.decode_add(wire, out)
        self.codec_s += time.monotonic() - begin_s

    def encode(self, number: int, values: Floats) -> Bytes:
        begin_s, feedback = time.monotonic(), self.site.error_feedback
        at = self.pieces[number].at
        if feedback is not None:
            values += feedback.lost[at]
        codec = self.site.codec
        wire = codec.encode(values, self._slab.take(codec.wire_bytes(values.size)))
        if feedback is not None:
            self.site.codec.decode(wire, feedback.pending[at])
            np.subtract(values, feedback.pending[at], out=feedback.pending[at])
        self.codec_s += time.monotonic() - begin_s
        return wire


class _RingLane(_Lane):
    def __init__(self, site: _Site, lane: int, pieces: dict[int, _Piece]) -> None:
        super().__init__(site, lane, pieces)
        self.num_sites = len(site.ring)
        self.place = site.ring.index(site.rank)
        self.next = site.ring[(self.place + 1) % self.num_sites]
        before = site.ring[(self.place - 1) % self.num_sites]
        for number, piece in pieces.items():
            gone = (self.place - piece.chunk) % self.num_sites
            if gone > 0:
                self.awaited.add((before, gone - 1, number))
            if gone < self.num_sites - 1:
                self.awaited.add((before, self.num_sites - 1 + gone, number))

    def first(self) -> Iterator[None]:
        for number, piece in self.pieces.items():
            if piece.chunk == self.place:
                self.send(self.next, 0, number, self.contribute(number))
                yield

    def take(self, frame: Frame) -> None:
        number, wire, hop = frame.piece, frame.payload, frame.hop
        last_sum, last = self.num_sites - 2, 2 * self.num_sites - 3
        if hop <= last_sum and self.site.is_heavy[self.site.rank]:
            wire = self.contribute(number, wire)
        if hop < last:
            self.send(self.next, hop + 1, number, wire)
        if hop >= last_sum:
            self.finish(number, wire)


class _AllToAllLane(_Lane):
    def __init__(self, site: _Site, lane: int, pieces: dict[int, _Piece]) -> None:
        super().__init__(site, lane, pieces)
        self.others = [rank for rank in range(len(site.is_heavy)) if rank != site.rank]
        self._parts: dict[int, dict[int, Bytes]] = {}
        for number, piece in pieces.items():
            if piece.chunk != site.rank:
                self.awaited.add((piece.chunk, 1, number))
                continue
            heavy = [rank for rank in self.others if site.is_heavy[rank]]
            self._parts[number] = {}
            self.awaited |= {(rank, 0, number) for rank in heavy}

    def first(self) -> Iterator[None]:
        for number, piece in self.pieces.items():
            if piece.chunk == self.site.rank:
                if not any(self.site.is_heavy[rank] for rank in self.others):
                    self._sum(number)
                    yield
            elif self.site.is_heavy[self.site.rank]:
                self.send(piece.chunk, 0, number, self.contribute(number))
                yield

    def take(self, frame: Frame) -> None:
        if frame.hop == 1:
            self.finish(frame.piece, frame.payload)
            return
        self._parts[frame.piece][frame.source] = frame.payload
        if len(self._parts[frame.piece]) == sum(self.site.is_heavy[rank] for rank in self.others):
            self._sum(frame.piece)

    def _sum(self, number: int) -> None:
        values = self.own(number)
        for _, wire in sorted(self._parts.pop(number).items()):
            self.add(wire, values)
        wire = self.encode(number, values)
        for rank in self.others:
            self.send(rank, 1, number, wire)
        self.finish(number, wire)


TOPOLOGIES: dict[str, type[_Lane]] = {"ring": _RingLane, "all_to_all": _AllToAllLane}


def _size(piece: _Piece) -> int:
    return piece.at.stop - piece.at.start


def _in_threads(calls: Sequence[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls[1:]]
    for thread in threads:
        thread.start()
    guarded(calls[0])
    for thread in threads:
        thread.join()
    if errors:
        raise next((each for each in errors if not isinstance(each, LinkBroken)), errors[0])
