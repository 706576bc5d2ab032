"""Measure the speed to each peer once, between rounds.

The receiver times only the second half, because TCP's slow start and buffers distort the first.
"""

import time
from collections.abc import Callable

import numpy as np

from orrery.elastic.connection import Bytes, Header, PeerConnection

PROBE_S = 0.5
PROBE_BYTES = 1 << 26
FRAME = np.zeros(1 << 16, np.uint8)
ANSWER_S = 5.0
FASTEST = 4000  # maximum reported Mb/s. CPUs limit higher speeds.


class SpeedProbe:
    """Speed measurements. `found`: Mb/s by site id."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        # Sender's rank → (epoch, round), and (arrival time, bytes) per frame
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
