"""Packing: conservation, limits, lock-step balance, speed."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orrery.manifest.errors import OrreryError
from orrery.wire.columns import Columns
from orrery.wire.packing import LazyMicroBatches, micro_batches, pack

MAX = 100


def lock_step_cost(plan, lengths, quadratic):
    cost = np.asarray(lengths) + quadratic * np.asarray(lengths, float) ** 2
    return sum(
        max(cost[plan[rank][step]].sum() for rank in range(len(plan)))
        for step in range(len(plan[0]))
    )


@given(
    st.lists(st.integers(1, MAX), max_size=60), st.integers(1, 5), st.sampled_from([0.0, 0.01, 1.0])
)
def test_every_sample_is_packed_once_within_the_limit_and_in_lock_step(
    lengths, num_ranks, quadratic
):
    plan = pack(np.array(lengths, np.int64), num_ranks, MAX, quadratic)
    assert len(plan) == num_ranks
    assert len({len(of_rank) for of_rank in plan}) == 1
    every = [int(i) for of_rank in plan for bin in of_rank for i in bin]
    assert sorted(every) == list(range(len(lengths)))
    for of_rank in plan:
        for bin in of_rank:
            assert sum(lengths[i] for i in bin) <= MAX
            assert list(bin) == sorted(bin)


@given(st.lists(st.integers(1, MAX), max_size=60), st.integers(1, 5))
def test_rows_of_the_longest_stay_within_the_limit_where_a_model_pads(lengths, num_ranks):
    plan = pack(np.array(lengths), num_ranks, MAX, padded=True)
    assert len({len(steps) for steps in plan}) == 1
    packs = [[lengths[index] for index in samples] for steps in plan for samples in steps]
    assert all(not each or len(each) * max(each) <= MAX for each in packs)
    assert sorted(index for steps in plan for samples in steps for index in samples) == list(
        range(len(lengths))
    )


@given(st.lists(st.integers(1, MAX), max_size=60), st.sampled_from([4, 16]))
def test_samples_that_ranks_share_are_packed_with_their_padding(lengths, multiple):
    [plan] = pack(np.array(lengths, np.int64), 1, MAX, multiple=multiple)
    padded = -(-np.array(lengths, np.int64) // multiple) * multiple
    assert all(padded[samples].sum() <= -(-MAX // multiple) * multiple for samples in plan)
    assert sorted(index for samples in plan for index in samples) == list(range(len(lengths)))


@given(st.lists(st.integers(1, MAX), min_size=1, max_size=60), st.integers(1, 5))
def test_the_number_of_micro_steps_is_near_the_least(lengths, num_ranks):
    plan = pack(np.array(lengths, np.int64), num_ranks, MAX)
    # No two of the latter share a bin.
    least = max(-(-sum(lengths) // MAX), sum(n > MAX / 2 for n in lengths))
    # The optimum is at most 3/2 of this bound.
    assert len(plan[0]) <= -(-(11 * -(-3 * least // 2) // 9 + 1) // num_ranks)


@given(st.lists(st.integers(1, MAX), min_size=1, max_size=40), st.integers(2, 4))
def test_ranks_differ_by_at_most_the_neighbouring_costs(lengths, num_ranks):
    """No other bin's cost lies strictly between two costs of one micro-step."""
    plan = pack(np.array(lengths, np.int64), num_ranks, MAX, 0.01)
    cost = np.asarray(lengths) + 0.01 * np.asarray(lengths, float) ** 2
    loads = np.array([[cost[bin].sum() for bin in of_rank] for of_rank in plan])
    assert (loads[:, :-1].min(axis=0) >= loads[:, 1:].max(axis=0) - 1e-9).all()


def test_equal_samples_are_spread_evenly_instead_of_leaving_ranks_idle():
    plan = pack(np.full(40, 10), 4, MAX)
    assert [[len(bin) for bin in of_rank] for of_rank in plan] == [[10]] * 4
    plan = pack(np.full(12, 10), 4, MAX)
    assert [[len(bin) for bin in of_rank] for of_rank in plan] == [[3]] * 4


def test_the_quadratic_term_balances_attention():
    lengths = np.array([80] + [10] * 16)
    linear, quadratic = pack(lengths, 2, 160, 0.0), pack(lengths, 2, 160, 1.0)
    assert lock_step_cost(quadratic, lengths, 1.0) < lock_step_cost(linear, lengths, 1.0)


def test_more_ranks_than_samples_get_dummy_steps():
    plan = pack(np.array([5, 6]), 4, MAX)
    assert sorted(len(of_rank[0]) for of_rank in plan) == [0, 0, 1, 1]


def test_a_batch_without_samples_has_no_micro_steps():
    assert pack(np.zeros(0, np.int64), 3, MAX) == [[], [], []]


def test_a_sample_that_fits_nowhere_is_named():
    with pytest.raises(
        OrreryError,
        match=r"sample 1 has 101 tokens, but a micro-batch at most 100.*"
        r"max_tokens_per_micro_batch to at least 101",
    ):
        pack(np.array([5, 101]), 1, MAX)


def test_a_sample_without_tokens_is_named():
    with pytest.raises(OrreryError, match="sample 1 has 0 tokens"):
        pack(np.array([5, 0]), 1, MAX)


@pytest.mark.parametrize("longest", [200, 8_000, 131_072])
def test_a_hundred_thousand_samples_are_packed_within_a_second(longest):
    """Timed beside a sort of 800,000 numbers, so the machine's speed and load do not count."""
    lengths = np.random.default_rng(0).integers(1, longest + 1, 100_000)
    numbers = np.random.default_rng(1).random(800_000).tolist()
    ratios = []
    for _ in range(5):
        start = time.process_time()
        sorted(numbers)
        middle = time.process_time()
        plan = pack(lengths, 8, 131_072, 1e-5)
        ratios.append((time.process_time() - middle) / (middle - start))
        if ratios[-1] < 1 / 0.16:
            break
    assert min(ratios) < 1 / 0.16
    assert sum(len(bin) for of_rank in plan for bin in of_rank) == 100_000
    filled = lengths.sum() / (131_072 * 8 * len(plan[0]))
    assert filled > 0.9


def test_micro_batches_are_made_only_when_asked_for_and_dummies_have_the_columns():
    documents = [Columns(np.array([0, n]), {"token_id": np.full(n, n, np.int32)}) for n in (3, 4)]
    made = micro_batches(documents, pack(np.array([3, 4]), 3, MAX))
    whole = [Columns.concatenate(of_rank[0]) for of_rank in made]
    assert sorted(columns.num_tokens for columns in whole) == [0, 3, 4]
    assert all(columns.token["token_id"].dtype == np.int32 for columns in whole)

    asked = []
    lazy = LazyMicroBatches(3, lambda at: asked.append(at) or documents[0])
    assert len(lazy) == 3 and asked == []
    assert lazy[2] is documents[0] and asked == [2]
    with pytest.raises(IndexError):
        lazy[3]
