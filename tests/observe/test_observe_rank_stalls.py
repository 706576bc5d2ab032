"""The rank stall detector: which rank is stuck, which only wait for it, and which is slow."""

from dataclasses import replace

import pytest

from orrery.observe.hang_detector import AWAY_S, STILL_S, RankStallDetector
from orrery.runtime.health import DONE, HANG_S, Health, Heartbeat, Wait, listed

LOOK_S = 1.0


def rank(index, begun=50, completed=50, doing="training", still_s=STILL_S, waits=(), behind_s=None):
    open_waits = tuple(Wait(what, 0.0, 600.0, behind_s) for what in waits)
    return Health(
        "trainer",
        index,
        0.0,
        1,
        1,
        doing,
        0.0,
        7,
        waits=open_waits,
        still_s=still_s,
        heartbeat=Heartbeat(1, begun, completed, 8),
    )


def beating(health, now_s):
    """Return the health with newer heartbeats and no other change."""
    return (
        replace(health, heartbeat=replace(health.heartbeat, beats=int(now_s) + 2))
        if health.heartbeat
        else health
    )


def watched(*ranks, silent=(), for_s=STILL_S + 3, change=lambda name, health, now_s: health):
    """Return the first stall that a reader sees. `silent` ranks do not beat."""
    detector, now_s = RankStallDetector(), 0.0
    while now_s <= for_s:
        seen = {one.name: one if one.name in silent else beating(one, now_s) for one in ranks}
        if stall := detector.look(
            {name: change(name, health, now_s) for name, health in seen.items()}, now_s
        ):
            assert now_s > STILL_S
            return stall
        now_s += LOOK_S
    return None


def test_the_rank_that_no_collective_holds_is_to_blame_for_those_that_one_holds():
    stall = watched(rank(0, 53, 50), rank(1, 50, 50), rank(2, 53, 50), rank(3, 53, 50))
    assert stall.blamed == ("trainer.1",)
    assert stall.sentence == (
        "stall: trainer.1 made no progress for 41 s while training (step 7); trainer.0, "
        "trainer.2-3 wait in a collective"
    )


def test_a_rank_that_is_not_even_heard_is_to_blame_also_while_it_says_that_it_waits():
    waiting = rank(1, still_s=None, waits=["batch 8 from orchestrator"])
    stall = watched(rank(0, 53, 50), waiting, silent=["trainer.1"])
    assert stall.sentence == (
        "stall: trainer.1 sent no heartbeat for 41 s while waiting for batch 8 from "
        "orchestrator (step 7); trainer.0 waits in a collective"
    )
    assert watched(rank(0, 53, 50), waiting) is None, (
        "it is heard: its wait has a deadline of its own"
    )


@pytest.mark.parametrize("others", [[], [1]], ids=["alone", "beside one that waits too"])
def test_a_rank_that_is_not_heard_while_all_wait_is_to_blame_though_no_collective_holds_anybody(
    others,
):
    waiting = [
        rank(index, still_s=None, waits=["batch 8 from orchestrator"]) for index in (0, *others)
    ]
    assert watched(*waiting, silent=["trainer.0"], for_s=HANG_S) is None
    stall = watched(*waiting, silent=["trainer.0"], for_s=HANG_S + 3)
    assert stall.blamed == ("trainer.0",)
    assert (
        stall.sentence == "stall: trainer.0 sent no heartbeat for 91 s "
        "while waiting for batch 8 from orchestrator (step 7)"
    )


def late(index, begun=50):
    """Waits for what comes to all ranks at once."""
    return rank(index, begun, waits=["batch 8 from orchestrator"], behind_s=STILL_S)


def test_a_rank_that_still_waits_for_what_all_others_have_is_to_blame():
    stall = watched(rank(0, 53, 50), late(1), rank(2, 53, 50))
    assert stall.blamed == ("trainer.1",)
    assert stall.sentence == (
        "stall: trainer.1 made no progress for 41 s while waiting for batch 8 from orchestrator "
        "(step 7); trainer.0, trainer.2 wait in a collective"
    )
    assert watched(rank(0, 53, 50), late(1), late(2)).blamed == ("trainer.1", "trainer.2")
    assert watched(rank(0, 53, 50), late(1), rank(2)).blamed == ("trainer.2",), (
        "it does not even say that it waits"
    )
    assert watched(rank(0, 53, 50), late(1), rank(2), silent=["trainer.2"]).blamed == ("trainer.2",)


def test_how_long_the_others_have_been_gone_counts_and_not_how_long_it_has_waited():
    def leave(name, health, now_s):
        return health if name == "trainer.1" or now_s > 300 else beating(late(0), now_s)

    assert watched(rank(0, 53, 50), late(1), for_s=300 + STILL_S, change=leave) is None
    assert (
        "for 41 s while waiting"
        in watched(rank(0, 53, 50), late(1), for_s=303 + STILL_S, change=leave).sentence
    )
    through_files = rank(1, waits=["batch 8 from orchestrator"], behind_s=300.0)
    assert watched(rank(0, 53, 50), through_files, for_s=300) is None
    assert watched(rank(0, 53, 50), through_files, for_s=303).blamed == ("trainer.1",)


@pytest.mark.parametrize(
    "others",
    [
        [late(0)],
        [rank(0, 53, 50), rank(2, doing="copying a checkpoint", still_s=None)],
        [
            rank(0, 53, 50),
            replace(late(2), waits=(Wait("the compiler", 0.0, 600.0), *late(2).waits)),
        ],
        [rank(0)],
    ],
    ids=[
        "all wait",
        "one is at something else",
        "one has another wait besides",
        "no collective holds anybody",
    ],
)
def test_a_rank_may_wait_as_long_as_others_do_not_wait_for_it(others):
    assert watched(*others, late(1), for_s=300) is None


def test_ranks_that_a_collective_holds_before_a_wait_are_not_held_up_by_who_has_got_there():
    assert watched(rank(0, 49, 48), late(1, begun=50)).blamed == ("trainer.0",)


def test_where_a_collective_holds_all_those_behind_are_to_blame_and_all_where_nobody_is():
    assert watched(rank(0, 53, 50), rank(1, 51, 50)).blamed == ("trainer.1",)
    both = watched(rank(0, 51, 50), rank(1, 51, 50))
    assert both.blamed == ("trainer.0", "trainer.1")
    assert both.sentence == (
        "stall: trainer.0-1 made no progress for 41 s while training (step 7), all of them in a "
        "collective that does not end"
    )


@pytest.mark.parametrize(
    "other",
    [
        rank(1, doing="copying a checkpoint", still_s=None),
        rank(1, doing="training", still_s=None, waits=["the compiler"]),
        rank(1, doing="training", still_s=600.0),
    ],
    ids=["a deed of no known length", "a wait", "a first step"],
)
def test_nobody_is_stuck_while_one_has_a_reason_to_take_its_time(other):
    assert watched(rank(0, 53, 50), other, for_s=300) is None


@pytest.mark.parametrize(
    ("doing", "limit_s"), [("publishing version 7", STILL_S), ("loading weights", 300.0)]
)
@pytest.mark.parametrize("silent", [[], ["trainer.1"]], ids=["still", "silent"])
def test_a_rank_that_is_stuck_between_steps_is_to_blame_after_the_time_that_its_deed_may_take(
    doing, limit_s, silent
):
    ranks = rank(0, 53, 50, doing=doing, still_s=limit_s), rank(1, doing=doing, still_s=limit_s)
    assert watched(*ranks, silent=silent, for_s=limit_s) is None
    stall = watched(*ranks, silent=silent, for_s=limit_s + 3)
    assert stall.blamed == ("trainer.1",)
    assert (
        f"for {limit_s + 1:.0f} s while {doing} (step 7); trainer.0 waits in a collective"
        in stall.sentence
    )


def test_a_rank_between_steps_may_take_its_time_part_by_part():
    def load(name, health, now_s):
        parts = int(now_s // 299) if name == "trainer.1" else 0
        return replace(
            health, heartbeat=replace(health.heartbeat, marks=health.heartbeat.marks + parts)
        )

    loading = rank(1, doing="loading weights", still_s=300.0)
    assert watched(rank(0, 53, 50), loading, for_s=1500, change=load) is None


@pytest.mark.parametrize("what", ["begun", "completed", "marks"])
def test_a_slow_rank_is_not_stuck_as_long_as_it_moves(what):
    def move(name, health, now_s):
        count = getattr(health.heartbeat, what) + int(now_s // (STILL_S - 1))
        return (
            replace(health, heartbeat=replace(health.heartbeat, **{what: count}))
            if name == "trainer.1"
            else health
        )

    assert watched(rank(0, 53, 50), rank(1), for_s=10 * STILL_S, change=move) is None


def test_ranks_of_another_role_and_those_that_have_ended_hold_nobody_up():
    engine = Health("inference", 0, 0.0, 1, 1, "serving", 0.0)
    assert watched(rank(0, 53, 50), rank(1), engine).blamed == ("trainer.1",)
    assert watched(rank(0, 53, 50), rank(1, doing=DONE, still_s=None)).blamed == ("trainer.0",)
    assert watched(engine) is None


def test_a_looker_that_could_not_look_begins_anew():
    detector = RankStallDetector()

    def look(now_s):
        return detector.look(
            {one.name: beating(one, now_s) for one in (rank(0, 53, 50), rank(1))}, float(now_s)
        )

    back_s = int(STILL_S - 1 + AWAY_S + 1)
    assert not any(map(look, [*range(int(STILL_S)), *range(back_s, back_s + int(STILL_S) + 1)]))
    assert look(back_s + int(STILL_S) + 1).blamed == ("trainer.1",)


def test_an_attempt_that_begins_anew_has_not_stood_still_before():
    def restart(name, health, now_s):
        return replace(health, pid=2) if now_s > STILL_S / 2 else health

    assert watched(rank(0, 53, 50), rank(1), change=restart) is None


def test_names_are_drawn_together_only_where_they_are_neighbours():
    assert (
        listed([f"trainer.{index}" for index in (7, 0, 1, 2, 4, 5)] + ["router.0"])
        == "trainer.0-2, trainer.4-5, trainer.7, router.0"
    )
    assert listed([]) == ""
