"""Schedules at their corners."""

import math

import pytest

from orrery.manifest.schema import ConstantSchedule, CosineSchedule, LinearSchedule, WsdSchedule
from orrery.trainer.learner import learning_rate_factor

SCHEDULES = [
    ConstantSchedule(kind="constant", warmup_steps=4),
    LinearSchedule(kind="linear", warmup_steps=4, final_fraction=0.1),
    CosineSchedule(kind="cosine", warmup_steps=4, final_fraction=0.1),
    WsdSchedule(kind="wsd", warmup_steps=4, decay_steps=6, final_fraction=0.1),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_warm_up_rises_in_equal_parts_and_reaches_one(schedule):
    assert [learning_rate_factor(schedule, step, 20) for step in (1, 2, 3, 4)] == [
        0.25,
        0.5,
        0.75,
        1.0,
    ]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_rates_never_rise_after_the_warm_up_and_stay_within_zero_and_one(schedule):
    rates = [learning_rate_factor(schedule, step, 20) for step in range(4, 21)]
    assert rates == sorted(rates, reverse=True)
    assert min(rates) >= 0.0 and max(rates) == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=lambda s: s.kind)
def test_decays_end_at_the_final_fraction(schedule):
    assert learning_rate_factor(schedule, 20, 20) == learning_rate_factor(schedule, 21, 20) == 0.1


def test_the_shapes_at_their_middle():
    constant, linear, cosine, wsd = SCHEDULES
    assert learning_rate_factor(constant, 20, 20) == 1.0
    assert learning_rate_factor(linear, 12, 20) == pytest.approx(0.55)
    assert learning_rate_factor(cosine, 8, 20) == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    )
    assert learning_rate_factor(wsd, 14, 20) == 1.0
    assert learning_rate_factor(wsd, 17, 20) == pytest.approx(0.55)


def test_a_warm_up_longer_than_the_run_and_a_decay_longer_than_the_rest_are_taken_as_they_are():
    assert learning_rate_factor(ConstantSchedule(kind="constant", warmup_steps=10), 5, 5) == 0.5
    wsd = WsdSchedule(kind="wsd", warmup_steps=2, decay_steps=100, final_fraction=0.0)
    assert [learning_rate_factor(wsd, step, 6) for step in (2, 4, 6)] == [1.0, 0.5, 0.0]


def test_without_warm_up_the_first_step_has_the_whole_rate():
    assert learning_rate_factor(
        LinearSchedule(kind="linear", warmup_steps=0, final_fraction=0.0), 1, 1_000_000
    ) == pytest.approx(1.0, abs=1e-5)
