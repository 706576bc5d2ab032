"""The health view: only the reader's clock decides, not the writers' wall clocks."""

import asyncio
import time
from dataclasses import replace

import pytest

from orrery.observe import hang_detector
from orrery.observe.hang_detector import AWAY_S, HealthView
from orrery.runtime.health import (
    DONE,
    FAILED,
    Health,
    HealthFile,
    LoopBeats,
    Wait,
    beating_loop,
    read_health,
)

WALL_S = 1_800_000_000.0


def waiting(wall_s=WALL_S, deadline_s=600.0, pid=1):
    """Return the health of a rank at the start of a wait, by its own wall clock."""
    wait = Wait(
        "batch 4 from orchestrator", wall_s, None if deadline_s is None else wall_s + deadline_s
    )
    return Health("trainer", 1, wall_s, pid, 1, "training", wall_s - 5, 3, waits=(wait,))


def looks(view, health, begin_s, end_s):
    """Look at the same health from `begin_s` to `end_s`; return the first stall and its time."""
    clock_s = begin_s
    while clock_s <= end_s:
        seen = view.look({health.name: health}, clock_s)
        if stall := hang_detector.find_stall(seen, view.now_s):
            return stall, clock_s
        clock_s += 0.5
    return None, end_s


@pytest.mark.parametrize("ahead_s", [0.0, 1200.0, -3600.0])
def test_a_deadline_is_counted_from_when_the_looker_saw_the_wait_whatever_the_writers_clock_says(
    ahead_s,
):
    """A clock 20 minutes ahead must not end a wait. One an hour behind must not extend it."""
    stall, found_s = looks(HealthView(), waiting(WALL_S + ahead_s), 50.0, 1000.0)
    assert found_s == 50.0 + 600.0 + hang_detector.GRACE_S + 0.5
    assert stall.sentence == (
        "stall: trainer.1 is waiting 610 s for batch 4 from orchestrator while training (10 s "
        "past its deadline)"
    )


def test_a_clock_that_is_set_between_two_waits_changes_neither():
    view, first = HealthView(), waiting()
    assert looks(view, first, 0.0, 500.0)[0] is None
    second = Wait("engines to take version 3 (inference)", WALL_S - 3600, WALL_S - 3600 + 900)
    both = replace(first, time_s=WALL_S - 3600, waits=(*first.waits, second))
    [seen] = view.look({"trainer.1": both}, 500.5).values()
    assert [(wait.since_s, wait.deadline_s) for wait in seen.waits] == [
        (0.0, 600.0),
        (500.5, 1400.5),
    ]
    assert seen.wait.what == "batch 4 from orchestrator", "the one that runs out first"
    assert seen.time_s == 500.5 and seen.since_s == 0.0


def test_what_passes_while_nobody_looks_counts_for_no_wait():
    """The reader and the processes were stopped together, for example in a frozen container."""
    view, health = HealthView(), waiting(deadline_s=30.0)
    assert looks(view, health, 0.0, 20.0)[0] is None
    stall, found_s = looks(view, health, 5000.0, 5100.0)
    assert stall is not None and found_s == 5000.0 + 20.5 - AWAY_S


def test_a_new_deed_a_new_process_and_an_end_are_new():
    view, health = HealthView(), replace(waiting(), waits=(), deadline_s=WALL_S + 85)
    view.look({"trainer.1": health}, 0.0)
    [seen] = view.look({"trainer.1": health}, 8.0).values()
    assert (seen.time_s, seen.since_s, seen.deadline_s) == (0.0, 0.0, 90.0)
    [seen] = view.look(
        {"trainer.1": replace(health, since_s=WALL_S, deadline_s=WALL_S + 90)}, 9.0
    ).values()
    assert (seen.since_s, seen.deadline_s) == (9.0, 99.0)
    for pid, doing, clock_s in ((2, "training", 10.0), (2, FAILED, 11.0), (3, DONE, 12.0)):
        [seen] = view.look(
            {"trainer.1": replace(health, pid=pid, doing=doing, deadline_s=None)}, clock_s
        ).values()
        assert (seen.since_s, seen.deadline_s) == (clock_s, None)


def test_of_two_changes_on_two_hosts_with_unrelated_clocks_the_reader_knows_the_earlier_one():
    view, said = HealthView(), {}
    for number, (name, boot, up_s) in enumerate(
        (("trainer.0", "a", 0.0), ("trainer.1", "b", 86_400.0), ("trainer.2", "b", 86_400.0))
    ):
        said[name] = replace(waiting(), index=number, boot=boot, clock_s=up_s)
    for step in range(1, 20):  # the delay from a change to the look grows with each look
        said = {
            name: replace(one, step=step, clock_s=one.clock_s + 1.0) for name, one in said.items()
        }
        view.look(said, 500.0 + step + 0.02 * step)
    for name, after_s in (("trainer.2", 0.30), ("trainer.1", 0.31), ("trainer.0", 0.40)):
        said[name] = replace(said[name], doing=FAILED, clock_s=said[name].clock_s + after_s)
    view.look(said, 520.0)
    assert sorted(said, key=view.changed_s) == ["trainer.2", "trainer.1", "trainer.0"]


def test_an_event_loop_that_does_not_turn_is_a_stall_by_the_readers_clock():
    view = HealthView()
    loop = Health(
        "orchestrator",
        0,
        WALL_S,
        1,
        1,
        "generating for batch 4",
        WALL_S,
        4,
        loop_beats=LoopBeats(7, WALL_S + 500, 90.0),
    )
    late = replace(waiting(deadline_s=7200.0), loop_beats=None)
    clock_s = 0.0
    while not (
        stall := hang_detector.find_stall(
            view.look({"orchestrator.0": loop, "trainer.1": late}, clock_s), view.now_s
        )
    ):
        clock_s += 0.5
        loop = replace(loop, time_s=loop.time_s + 0.5, step=loop.step + 1)  # another thread runs
        if clock_s < 300.0:
            loop = replace(
                loop, loop_beats=replace(loop.loop_beats, count=loop.loop_beats.count + 1)
            )
    assert clock_s == 299.5 + 90.5 and stall.blamed == ("orchestrator.0",)
    assert (
        stall.sentence == "stall: the event loop of orchestrator.0 sent no heartbeat for 90 s, "
        f"while generating for batch 4 (step {loop.step})"
    )


async def test_an_event_loop_says_that_it_turns_until_it_ends_and_a_blocked_one_does_not(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("ORRERY_DEADLINE_SCALE", "0.001")  # the loop beats every 22 ms

    def turns():
        return read_health(tmp_path, "rl")["orchestrator.0"].loop_beats

    async with beating_loop(HealthFile(tmp_path, "rl", "orchestrator", 0, 1)):
        while (seen := turns()) is None or seen.count < 3:
            await asyncio.sleep(0.01)
        assert seen.within_s == pytest.approx(0.09)
        blocked = turns()
        time.sleep(0.2)  # the sleep is the blocked loop
        assert turns() == blocked
    assert turns() is None
