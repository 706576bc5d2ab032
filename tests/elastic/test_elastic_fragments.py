"""Streaming fragments and delayed application, against a simulation in one process."""

import numpy as np
import pytest
from site_group import NESTEROV, ArrayWeights, SiteGroup

from orrery.elastic.loop import OuterLoop, make_fragments, weighted_mean
from orrery.elastic.types import LinkBroken

NAMES, SIZE, PHASE, NUM_ROUNDS = ("a", "b", "c", "d", "e"), 300, 3, 7
LAYERS = [slice(SIZE * i, SIZE * (i + 1)) for i in range(len(NAMES))]


def start() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(SIZE).astype(np.float32) for name in NAMES}


def inner_step(arrays: dict[str, np.ndarray], site: int, step: int) -> int:
    draw = np.random.default_rng([site, step])
    for values in arrays.values():
        values += np.float32(0.1) * (draw.standard_normal(SIZE).astype(np.float32) - values)
    return 100 + site + step


def train(loop: OuterLoop, arrays: dict, rank: int, delay: int, merge: float) -> list:
    """Train steps with a round every PHASE steps, applied `delay` steps later."""
    rows = [loop.exchange()]
    for step in range(1, NUM_ROUNDS * PHASE + delay + 1):
        loop.count(inner_step(arrays, rank, step))
        if loop.is_in_flight:
            if step % PHASE == delay:
                rows.append(loop.apply(merge))
        elif step % PHASE == 0:
            rows.append(loop.exchange()) if not delay else loop.send()
    return rows


def trained(group: SiteGroup, num_fragments: int, delay: int, merge: float):
    def work(rank: int):
        weights = ArrayWeights(start())
        loop = group.site(rank).loop(NESTEROV, weights, make_fragments(LAYERS, num_fragments))
        rows = train(loop, weights.arrays, rank, delay, merge)
        now = np.concatenate([weights.arrays[name] for name in NAMES])
        return now, loop.state, rows

    return group.run(work)


def simulated(num_sites: int, num_fragments: int, delay: int, merge: float):
    """Return (weights of each site, θ_start, m) of the same training without threads."""
    shared = np.concatenate(list(start().values()))
    momentum, sites = np.zeros_like(shared), [start() for _ in range(num_sites)]
    flat = [np.concatenate(list(each.values())) for each in sites]
    tokens, flying = np.zeros((num_sites, num_fragments), int), None
    for step in range(1, NUM_ROUNDS * PHASE + delay + 1):
        for site, values in enumerate(flat):
            arrays = {n: values[at] for n, at in zip(NAMES, LAYERS, strict=True)}
            tokens[site] += inner_step(arrays, site, step)
        if flying is None and step % PHASE == 0:
            fragment = (step // PHASE - 1) % num_fragments
            index = np.concatenate(
                [np.arange(s.start, s.stop) for s in LAYERS[fragment::num_fragments]]
            )
            mean = weighted_mean(
                [shared[index] - v[index] for v in flat], tokens[:, fragment].tolist()
            )
            tokens[:, fragment] = 0
            flying = index, *NESTEROV.step(shared[index], momentum[index], mean)
        if flying is not None and step % PHASE == delay:
            index, theta, momentum[index] = flying
            shared[index], kept, flying = theta, np.float32(merge), None
            for values in flat:
                values[index] = kept * values[index] + (np.float32(1) - kept) * theta
    return flat, shared, momentum


@pytest.mark.parametrize(
    ("fragments", "delay", "merge"), [(1, 0, 0.0), (2, 0, 0.0), (1, 2, 0.0), (3, 2, 0.5)]
)
def test_sites_equal_a_simulation_to_the_bit(fragments, delay, merge):
    sites = trained(SiteGroup(3), fragments, delay, merge)
    flat, shared, momentum = simulated(3, fragments, delay, merge)
    for (now, state, rows), expected in zip(sites, flat, strict=True):
        assert np.array_equal(now, expected)
        assert np.array_equal(state.start, shared) and np.array_equal(state.momentum, momentum)
        assert [row.digest for row in rows] == [row.digest for row in sites[0][2]]
    assert len({row.digest for row in sites[0][2]}) == NUM_ROUNDS + 1


def test_a_broken_link_in_flight_changes_no_bit():
    """Inner steps go on meanwhile, so Δ is that of the moment of sending."""

    def fails(what: str, rank: int, number: int, attempt: int) -> None:
        if number in (2, 3) and rank == 1 and attempt == 0:
            raise LinkBroken(2, "connection reset")

    shaken, calm = (trained(SiteGroup(3, fails=f), 3, 2, 0.5) for f in (fails, None))
    assert [row.num_attempts for row in shaken[0][2]] == [1, 1, 2, 2, 1, 1, 1, 1]
    for (one, state, _), (other, expected, _) in zip(shaken, calm, strict=True):
        assert np.array_equal(one, other)
        assert np.array_equal(state.momentum, expected.momentum)


def test_a_fragment_has_every_layer_at_its_distance():
    found = make_fragments(LAYERS, 2)
    assert found == [(LAYERS[0], LAYERS[2], LAYERS[4]), (LAYERS[1], LAYERS[3])]
