"""The outer loop against a simulation in one process, and after broken links."""

import numpy as np
import pytest
import torch
from site_group import NESTEROV, PLAIN, ArrayWeights, SiteGroup, run_rounds

from orrery.elastic.loop import MAX_ATTEMPTS, OuterOptimizer, OuterState, no_step, weighted_mean
from orrery.elastic.types import ElasticError, LinkBroken

SIZE = 1000


def start(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(SIZE).astype(np.float32) for name in ("b", "a")}


def inner_step(arrays: dict[str, np.ndarray], site: int, number: int) -> int:
    """Pull the weights to the site's own target. Return the tokens."""
    draw = np.random.default_rng([site, number])
    for values in arrays.values():
        values += np.float32(0.1) * (draw.standard_normal(SIZE).astype(np.float32) - values)
    return 100 + site


def trained(group: SiteGroup, optimizer: OuterOptimizer, num_rounds: int):
    def work(rank: int):
        weights = ArrayWeights(start())
        loop = group.site(rank).loop(optimizer, weights)
        rows = run_rounds(loop, num_rounds, lambda number: inner_step(weights.arrays, rank, number))
        return weights, loop, rows

    return group.run(work)


def test_one_site_without_an_outer_optimizer_equals_plain_training_to_the_bit():
    [(weights, _, _)] = trained(SiteGroup(1), PLAIN, 5)
    plain = start()
    for number in range(1, 6):
        inner_step(plain, 0, number)
    assert all(np.array_equal(weights.arrays[name], plain[name]) for name in plain)


def test_sites_equal_a_simulation_in_one_process():
    sites = trained(SiteGroup(3), NESTEROV, 6)
    shared = np.concatenate([start()["a"], start()["b"]]).astype(np.float64)
    momentum = np.zeros_like(shared)
    for number in range(1, 7):
        total = np.zeros_like(shared)
        for site in range(3):
            own = {
                "b": shared[SIZE:].astype(np.float32).copy(),
                "a": shared[:SIZE].astype(np.float32).copy(),
            }
            tokens = inner_step(own, site, number)
            total += tokens * (shared - np.concatenate([own["a"], own["b"]]))
        delta = total / (100 + 101 + 102)
        momentum = 0.9 * momentum + delta
        shared -= 0.7 * (delta + 0.9 * momentum)
    found = sites[0][1].state.start
    assert np.abs(found - shared).max() <= 1e-6 * np.abs(shared).max()


def test_the_first_step_moves_against_the_mean_delta_by_lr_times_one_plus_momentum():
    state = OuterState(SIZE)
    state.start[:] = before = start()["a"]
    state.delta[:] = delta = start(1)["a"]
    state.step(NESTEROV.step)
    np.testing.assert_allclose(state.start, before - 0.7 * 1.9 * delta, atol=1e-6)


def test_the_outer_step_is_that_of_prime_with_equal_weights():
    """Its Δ is old minus new, divided by n before the sum, and a gradient of torch's SGD."""
    ours = OuterState(SIZE)
    ours.start[:] = start()["a"]
    theirs = torch.from_numpy(start()["a"].copy()).requires_grad_()
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(1, 6):
        before = theirs.detach().numpy().copy()
        sites = [{"a": before.copy()} for _ in range(3)]
        for site, arrays in enumerate(sites):
            inner_step(arrays, site, number)
        deltas = [before - arrays["a"] for arrays in sites]
        theirs.grad = torch.from_numpy(sum(each / np.float32(3) for each in deltas))
        sgd.step()
        ours.delta[:] = weighted_mean([ours.start - arrays["a"] for arrays in sites], [7, 7, 7])
        ours.step(NESTEROV.step)
        np.testing.assert_allclose(ours.start, theirs.detach().numpy(), atol=2e-6)


def test_momentum_without_nesterov_is_sgd_with_momentum():
    heavy = OuterOptimizer(0.5, 0.9, False)
    theta, momentum = heavy.step(*(np.full(1, x, np.float32) for x in (1.0, 2.0, 3.0)))
    assert (theta[0], momentum[0]) == pytest.approx((1.0 - 0.5 * 4.8, 4.8))


def coarse(delta: np.ndarray) -> np.ndarray:
    """Stand in for int8: quantise with one scale."""
    scale = np.abs(delta).max() / 127 or np.float32(1)
    return (np.rint(delta / scale) * scale).astype(np.float32)


@pytest.mark.parametrize("codec", [None, coarse], ids=["float32", "quantised"])
def test_all_sites_hold_equal_bits_after_every_round(codec):
    sites = trained(SiteGroup(4, codec), NESTEROV, 4)
    digests = [[row.digest for row in rows] for _, _, rows in sites]
    assert all(found == digests[0] for found in digests)
    assert len(set(digests[0])) == 5
    first = sites[0][0].arrays
    for weights, loop, _ in sites:
        assert all(np.array_equal(weights.arrays[name], first[name]) for name in first)
        assert np.array_equal(loop.state.momentum, sites[0][1].state.momentum)


def test_a_site_without_tokens_changes_neither_sum_nor_divisor():
    deltas = [start(seed)["a"] for seed in range(3)]
    with_joiner = weighted_mean(deltas, [5, 7, 0])
    assert np.array_equal(with_joiner, weighted_mean(deltas[:2], [5, 7]))
    assert not weighted_mean(deltas, [0, 0, 0]).any()


def test_rows_say_norm_cosine_bytes_and_weights():
    [(_, _, rows), _] = trained(SiteGroup(2), NESTEROV, 1)
    assert rows[0].delta_norm == 0 and rows[0].delta_cosine is None and rows[0].num_bytes == 0
    assert rows[1].weights == (100, 101) and rows[1].num_bytes == 8 * SIZE
    assert rows[1].delta_norm > 1 and 0.5 < rows[1].delta_cosine < 1


def test_frozen_weights_are_paired_by_name():
    """Defect 7 of prime: it paired trained weights with all weights by position."""

    def work(rank: int):
        weights = ArrayWeights(start(), frozen=["a"])
        weights.arrays["a"] += rank  # sites may even differ in what is not exchanged
        loop = group.site(rank).loop(NESTEROV, weights)
        run_rounds(loop, 2, lambda number: inner_step({"b": weights.arrays["b"]}, rank, number))
        return weights.arrays

    group = SiteGroup(2)
    one, other = group.run(work)
    assert np.array_equal(one["a"], start()["a"]) and np.array_equal(other["a"], start()["a"] + 1)
    assert np.array_equal(one["b"], other["b"]) and not np.array_equal(one["b"], start()["b"])


def broken(last_attempt: int):
    def fail(what: str, rank: int, number: int, attempt: int) -> None:
        if number == 2 and rank == 0 and attempt <= last_attempt:
            raise LinkBroken(1, "connection reset")

    return fail


def test_a_retry_computes_delta_again():
    calm = trained(SiteGroup(2), NESTEROV, 3)
    shaken = trained(SiteGroup(2, fails=broken(0)), NESTEROV, 3)
    for (_, _, rows), (_, _, expected) in zip(shaken, calm, strict=True):
        assert [row.num_attempts for row in rows] == [1, 1, 2, 1]
        assert [row.digest for row in rows] == [row.digest for row in expected]


def test_an_unfinished_round_never_forks_the_replicas():
    """Defect 5 of prime: after its retries a site stepped with its Δ alone."""
    group = SiteGroup(2, fails=broken(MAX_ATTEMPTS))

    def work(rank: int):
        weights = ArrayWeights(start())
        loop = group.site(rank).loop(NESTEROV, weights)
        rows = run_rounds(loop, 1, lambda number: inner_step(weights.arrays, rank, number))
        loop.count(inner_step(weights.arrays, rank, 2))
        trained_alone = weights.arrays["a"].copy()
        with pytest.raises(ElasticError, match="round 2: 16 attempts failed"):
            loop.exchange()
        assert np.array_equal(weights.arrays["a"], trained_alone)
        assert loop.round == 2 and loop.tokens == 100 + rank
        assert loop.state.digest(no_step) == rows[-1].digest
        return rows[-1].digest

    one, other = group.run(work)
    assert one == other
