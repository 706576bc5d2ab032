"""`find_stall` as a pure function: stalls, other states, and the named processes."""

from hypothesis import given
from hypothesis import strategies as st

from orrery.observe.hang_detector import DEADLOCK_S, GRACE_S, awaited, deadlocked, find_stall
from orrery.runtime.health import DONE, FAILED, Health, Wait

NOW = 10_000.0
ROLES = ("trainer", "orchestrator", "inference", "router")


def health(role, index=0, doing="acting", waits=(), changed_s=NOW - 1, deadline_s=None, step=None):
    """A process's health; `waits` are (text, since, deadline)."""
    return Health(
        role,
        index,
        changed_s,
        1,
        1,
        doing,
        changed_s,
        step,
        deadline_s,
        tuple(Wait(*wait) for wait in waits),
    )


def named(*processes):
    return {one.name: one for one in processes}


def test_a_run_in_which_everyone_is_in_time_does_not_stall():
    processes = named(
        health("trainer", waits=[("batch 4 from orchestrator", NOW - 200, NOW + 100)]),
        health("orchestrator", waits=[("rollouts from inference", NOW - 5, None)]),
        health("inference"),
    )
    assert find_stall(processes, NOW) is None


def test_an_overdue_wait_names_the_whole_chain_and_blames_its_end():
    processes = named(
        health(
            "trainer",
            1,
            "waiting for data",
            [("batch 4 from orchestrator", NOW - 320, NOW - 20)],
            step=3,
        ),
        health("orchestrator", 0, "filling", [("rollouts from inference", NOW - 310, None)]),
        health("inference", 0, "generating", changed_s=NOW - 300),
    )
    stall = find_stall(processes, NOW)
    assert stall.blamed == ("inference.0",)
    assert stall.sentence == (
        "stall: trainer.1 is waiting 320 s for batch 4 from orchestrator while waiting for data "
        "(20 s past its deadline); orchestrator.0 is waiting 310 s for rollouts from inference "
        "while filling; inference.0 has been at generating for 300 s"
    )


def test_the_role_itself_gets_the_grace_time_to_raise_its_own_error():
    late = health("trainer", waits=[("batch 4 from orchestrator", NOW - 400, NOW - GRACE_S)])
    assert find_stall(named(late), NOW) is None
    assert find_stall(named(late), NOW + 1) is not None


def test_a_deed_with_a_deadline_can_be_overdue_too():
    stall = find_stall(
        named(
            health("trainer", doing="publishing", changed_s=NOW - 90, deadline_s=NOW - 30, step=7)
        ),
        NOW,
    )
    assert (
        stall.sentence
        == "stall: trainer.0 has been at publishing (step 7) for 90 s (30 s past its deadline)"
    )


def test_processes_that_ended_wait_for_nobody():
    ended = [
        health(role, doing=doing, waits=[("x from trainer", 0.0, 1.0)])
        for role, doing in (("trainer", FAILED), ("inference", DONE))
    ]
    assert find_stall(named(*ended), NOW) is None


def test_a_circle_is_a_deadlock_only_when_all_of_it_is_silent_for_long():
    def circle(changed_s):
        return named(
            health("trainer", waits=[("batch 4 from orchestrator", 0, None)], changed_s=changed_s),
            health(
                "orchestrator",
                waits=[("version 3 from trainer", 0, None)],
                changed_s=NOW - DEADLOCK_S - 1,
            ),
            health("inference", changed_s=NOW - 10_000),
        )

    assert find_stall(circle(NOW - 2), NOW) is None
    stall = find_stall(circle(NOW - DEADLOCK_S - 1), NOW)
    assert stall.blamed == ("orchestrator.0", "trainer.0")
    assert "orchestrator.0 and trainer.0 wait for one another" in stall.sentence


def test_a_wait_for_a_role_that_is_done_is_a_stall_once_both_are_silent_for_long():
    def run(
        *others,
        waited_s=NOW - 400,
        done_s=NOW - DEADLOCK_S - 1,
        waits=("batch 4 from orchestrator",),
    ):
        waiting = health(
            "trainer", 0, "waiting", [(what, waited_s, NOW + 9000) for what in waits], waited_s
        )
        return named(waiting, health("orchestrator", doing=DONE, changed_s=done_s), *others)

    stall = find_stall(run(), NOW)
    assert stall.blamed == ("trainer.0",)
    assert stall.sentence == (
        "stall: trainer.0 is waiting 400 s for batch 4 from orchestrator while waiting; "
        "orchestrator.0 is done and sends nothing more"
    )
    assert find_stall(run(waited_s=NOW - 2), NOW) is None
    assert find_stall(run(done_s=NOW - 2), NOW) is None, "what it sent last may be on its way"
    assert find_stall(run(health("orchestrator", 1)), NOW) is None
    assert find_stall(run(waits=("batch 4 from orchestrator", "a disk")), NOW) is None
    assert find_stall(run(health("trainer", 1, "exporting", changed_s=NOW - 5)), NOW) is not None, (
        "others that go on help nobody"
    )
    assert (
        find_stall(
            named(
                health("orchestrator", doing=DONE, changed_s=0.0), health("trainer", changed_s=0.0)
            ),
            NOW,
        )
        is None
    )


def test_a_process_with_a_second_wait_for_someone_free_is_not_deadlocked():
    processes = named(
        health("trainer", waits=[("batch 4 from orchestrator", 0, None)]),
        health(
            "orchestrator",
            waits=[("version 3 from trainer", 0, None), ("rollouts from inference", 0, None)],
        ),
        health("inference"),
    )
    assert deadlocked(processes) == set()


def test_a_wait_may_name_one_process_of_a_role():
    processes = named(
        health("trainer", 0),
        health("trainer", 1),
        health("orchestrator", waits=[("step 2 from trainer.1", 0, None)]),
    )
    assert awaited(processes["orchestrator.0"], processes) == [{"trainer.1"}]


texts = st.lists(st.sampled_from([*ROLES, "trainer.1", "a store"]), max_size=2).map(
    lambda names: "it from " + " and ".join(names)
)
waits = st.lists(
    st.tuples(texts, st.just(NOW - 1000), st.none() | st.floats(NOW - 100, NOW + 100)), max_size=3
)
processes = st.lists(
    st.builds(
        health,
        st.sampled_from(ROLES),
        st.integers(0, 1),
        st.sampled_from(["acting", DONE]),
        waits,
        st.floats(NOW - 500, NOW),
    ),
    max_size=6,
).map(lambda many: named(*many))


@given(processes)
def test_the_deadlocked_are_exactly_those_whom_nobody_outside_can_move(living):
    """Compare with a simulation that moves every process that can move."""
    moved: set[str] = set()
    while True:
        can = {
            name
            for name, one in living.items()
            if name not in moved
            and (not one.waits or any(not names or names & moved for names in awaited(one, living)))
        }
        if not can:
            break
        moved |= can
    assert deadlocked(living) == set(living) - moved


@given(processes)
def test_a_stall_names_living_processes_and_has_a_cause(living):
    stall = find_stall(living, NOW)
    late = [
        one
        for one in living.values()
        if one.doing != DONE
        and one.wait
        and one.wait.deadline_s
        and one.wait.deadline_s + GRACE_S < NOW
    ]
    if late:
        assert stall is not None
    if stall is not None:
        assert all(living[name].doing != DONE and name in stall.sentence for name in stall.blamed)
        assert late or all(NOW - living[name].time_s > DEADLOCK_S for name in stall.blamed)


@given(processes, st.floats(0, 1000))
def test_a_stall_does_not_go_away_by_waiting(living, later_s):
    if find_stall(living, NOW) is not None:
        assert find_stall(living, NOW + later_s) is not None
