"""Choose the ring's order and relays between sites by measured speeds.

- Speeds are in Mb/s (0 if unmeasured). Sites use the same speeds, so their choices agree.
- A pair uses a relay if neither site has a listener, or the relayed path is GAIN times faster. A
  relay halves the speed, because it also sends its own frames.
- The ring's order maximises the slowest edge's speed. The search is greedy above MAX_EXACT_SITES
  sites.
"""

from functools import cache

from orrery.elastic.types import Epoch

GAIN = 1.25  # minimum speed ratio to change a path
MAX_EXACT_SITES = 10


@cache
def relay(epoch: Epoch, a: int, b: int) -> int | None:
    """Return the relay between ranks a and b, if any."""
    accepting = [r for r, each in enumerate(epoch.members) if each.port and r not in (a, b)]
    if not accepting:
        return None
    turn = accepting[(a + b) % len(accepting) :] + accepting  # spread pairs over equal relays
    best = max(turn, key=lambda r: _detour(epoch, a, r, b))
    if not epoch.members[a].port and not epoch.members[b].port:
        return best
    direct = speed(epoch, a, b)
    return best if direct and _detour(epoch, a, best, b) > GAIN * direct else None


@cache
def ring_order(epoch: Epoch) -> tuple[int, ...]:
    num = len(epoch.members)
    if not epoch.speeds or num < 4:  # all orders of 3 sites are the same ring
        return tuple(range(num))
    rows = [
        [_path(epoch, a, relay(epoch, a, b), b) if a != b else 0.0 for b in range(num)]
        for a in range(num)
    ]
    most = max(map(max, rows))
    # Unmeasured pairs get the highest speed, so they are never the slowest edge.
    rows = [[each or most for each in row] for row in rows]
    return _exact(rows) if num <= MAX_EXACT_SITES else _greedy(rows)


def slowest_edge(newest: Epoch, chosen: Epoch) -> float:
    """Return the slowest edge's speed in `chosen`'s ring, as measured in `newest`."""
    order = ring_order(chosen)
    edges = zip(order, [*order[1:], *order[:1]], strict=True)
    found = [_path(newest, a, relay(chosen, a, b), b) for a, b in edges if a != b]
    return min(filter(None, found), default=0.0)


def speed(epoch: Epoch, a: int, b: int) -> int:
    if not epoch.speeds:
        return 0
    found = [each for each in (epoch.speeds[a][b], epoch.speeds[b][a]) if each]
    return min(found, default=0)


def _detour(epoch: Epoch, a: int, over: int, b: int) -> float:
    return min(speed(epoch, a, over), speed(epoch, over, b)) / 2


def _path(epoch: Epoch, a: int, over: int | None, b: int) -> float:
    return max(float(speed(epoch, a, b)), 0.0 if over is None else _detour(epoch, a, over, b))


def _exact(rows: list[list[float]]) -> tuple[int, ...]:
    """Return the best order by dynamic programming over visited ranks."""
    num = len(rows)
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(1, 0): (float("inf"), (0,))}
    for visited in range(1, 1 << num, 2):
        for last in range(num):
            if (visited, last) not in best:
                continue
            slowest, path = best[visited, last]
            for rank in range(1, num):
                key = visited | 1 << rank, rank
                edge = min(slowest, rows[last][rank])
                if not visited >> rank & 1 and edge > best.get(key, (0.0, ()))[0]:
                    best[key] = edge, (*path, rank)
    ends = [best[(1 << num) - 1, last] for last in range(1, num)]
    return max(ends, key=lambda end: min(end[0], rows[end[1][-1]][0]))[1]


def _greedy(rows: list[list[float]]) -> tuple[int, ...]:
    order, left = [0], set(range(1, len(rows)))
    while left:
        order.append(max(sorted(left), key=lambda rank: rows[order[-1]][rank]))
        left.remove(order[-1])
    return tuple(order)
