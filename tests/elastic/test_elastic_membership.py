"""Membership, scripted: every transition of the ledger, without clocks and sleeps."""

import random
import time
from functools import partial

import msgspec
import pytest
from scripted import ScriptedEvent, ScriptedLog, SiteCrashed
from scripted_sites import HOUR_S, TERMS, ScriptedSites, call, member, results

from orrery.elastic import ledger as rules
from orrery.elastic.certificates import make_authority, make_site
from orrery.elastic.etcd_site import EtcdSite
from orrery.elastic.ledger import Behind, Ledger
from orrery.elastic.membership import RoundPace
from orrery.elastic.routes import ring_order
from orrery.elastic.types import ElasticError, LeaseLost, OuterRound

IDS = [member(i).id for i in range(8)]


def founded(count: int) -> Ledger:
    ledger = Ledger()
    for i in range(count):
        ledger = rules.admit(ledger, member(i), TERMS, frozenset(IDS[:i]))
    return ledger


def exchanging(count: int) -> tuple[Ledger, OuterRound]:
    ledger = founded(count)
    for i in range(count):
        ledger = rules.arrive(ledger, IDS[i], 0, 10 * (i + 1))
    ledger = rules.start(ledger, frozenset(IDS[:count]))
    round = ledger.open_round(IDS[0])
    assert round is not None
    return ledger, round


def test_all_sites_get_the_same_round_with_ranks_by_id():
    sites = ScriptedSites(4)
    rounds = sites.rounds(2, 0, 3, 1)
    assert rounds[0] == rounds[1] == rounds[2] == rounds[3]
    assert rounds[0].weights == (10, 20, 30, 40)
    assert [each.id for each in rounds[0].epoch.members] == IDS[:4]


def test_a_site_that_joins_is_not_waited_for_and_enters_with_weight_0():
    sites = ScriptedSites(2)
    sites.play(0, 1)
    sites.add(2)
    sites.play(0, 1)  # the newcomer is still taking its state
    [late, *rounds] = sites.rounds(2, 0, 1)
    assert late == rounds[0] and late.weights == (10, 20, 0) and late.number == 2


def test_a_newcomer_whose_state_is_old_takes_a_newer_snapshot():
    sites = ScriptedSites(2)
    sites.play(0, 1)
    sites.add(2)
    sites.play(0, 1)
    with pytest.raises(Behind) as caught:
        sites.sites[2].begin_round(1, 0, 1.0)
    assert caught.value.committed == 1


def test_a_site_that_leaves_is_not_waited_for():
    sites = ScriptedSites(3)
    sites.play(0, 1, 2)
    calls = sites.begin(0, 1)
    sites.sites[2].leave()
    assert [len(round.weights) for round in results(calls)] == [2, 2]


def test_a_crash_in_the_exchange_restarts_the_round_in_a_new_epoch():
    sites = ScriptedSites(3, trace=[ScriptedEvent("crash", 1, 0, "exchange")])
    calls = sites.begin(0, 1, 2)
    with pytest.raises(SiteCrashed):
        calls[1].result(timeout=20)
    first, _, third = (one.exception() or one.result() for one in calls)
    again = [call(sites.sites[i].abort, r, [1]) for i, r in ((0, first), (2, third))]
    one, other = results(again)
    assert one == other
    assert one.number == 0 and one.epoch.number == first.epoch.number + 1
    assert one.weights == (10, 30)


def test_a_crash_after_the_exchange_does_not_undo_it():
    sites = ScriptedSites(3, trace=[ScriptedEvent("crash", 1, 0, "commit")])
    rounds = sites.rounds(0, 1, 2)
    calls = sites.commit(dict(enumerate(rounds)))
    assert calls[0].result(timeout=20) and calls[2].result(timeout=20)
    assert sites.ledger.committed.weights == (10, 20, 30)
    assert sites.ledger.ids == {IDS[0], IDS[2]}


def test_a_paused_site_is_fenced_and_returns_under_a_new_id():
    sites = ScriptedSites(2, trace=[ScriptedEvent("pause", 1, 0, "commit")])
    rounds = sites.rounds(0, 1)
    calls = sites.commit(dict(enumerate(rounds)))
    assert calls[0].result(timeout=20)
    with pytest.raises(LeaseLost):
        calls[1].result(timeout=20)
    with pytest.raises(LeaseLost):
        sites.sites[1].begin_round(1, 20, 1.0)
    with pytest.raises(ElasticError, match="draw a new one"):
        sites.sites[1].join(member(1), TERMS)
    sites.sites[1].join(member(1, life=1), TERMS)
    assert sites.rounds(1, 0, number=1)[0].weights == (10, 0)


@pytest.mark.parametrize("minority", [3, 4])
def test_only_the_side_with_the_log_goes_on_after_a_partition(minority):
    sites = ScriptedSites(8)
    sites.play(*range(8))
    lost, kept = range(8 - minority, 8), range(8 - minority)
    epoch = sites.ledger.epoch
    sites.shared.cut(IDS[i] for i in lost)
    waiting = [call(sites.sites[i].begin_round, 1, 10, 3600.0) for i in lost]
    sites.play(*kept)
    assert len(sites.ledger.members) == 8 - minority and sites.ledger.epoch == epoch + 1
    assert not any(one.done() for one in waiting)
    sites.shared.heal()
    for one in waiting:
        with pytest.raises(LeaseLost):
            one.result(timeout=20)
    for i in lost:
        sites.sites[i].join(member(i, life=1), TERMS)
    rounds = sites.rounds(*lost, *kept, number=2)
    assert len(set(map(str, rounds))) == 1 and len(rounds[0].weights) == 8


def test_a_flapping_site_stops_no_round():
    sites = ScriptedSites(3)
    sites.play(0, 1, 2)
    for life in range(1, 20):
        sites.sites[2].leave()
        sites.sites[2].join(member(2, life), TERMS)
        sites.play(0, 1)
    assert sites.ledger.last == 19 and sites.ledger.ids == {IDS[0], IDS[1]}
    assert len(sites.ledger.joining) <= 1


def test_messages_of_an_older_epoch_change_nothing():
    ledger, old = exchanging(3)
    live = frozenset(IDS[:3])
    for i in range(3):
        ledger = rules.report(ledger, IDS[i], old, [])
    ledger = rules.settle(ledger, live)
    assert ledger.epoch == old.epoch.number + 1 and ledger.is_exchanging
    assert rules.acknowledge(ledger, IDS[0], old, "d") == ledger
    assert rules.report(ledger, IDS[0], old, [1]) == ledger


def test_a_link_is_given_up_only_when_it_breaks_twice_in_a_row():
    ledger, round = exchanging(3)
    live = frozenset(IDS[:3])
    for num_left in (3, 2):
        for i, lost in enumerate([[2], [], []]):
            ledger = rules.report(ledger, IDS[i], round, lost)
        ledger = rules.settle(ledger, live)
        round = ledger.open_round(IDS[0])
        assert len(round.weights) == num_left
    assert ledger.ids == {IDS[0], IDS[1]}


def test_the_sites_drop_as_few_as_they_can():
    broken = {(IDS[0], IDS[1]), (IDS[1], IDS[2])}
    assert rules.largest_connected(frozenset(IDS[:4]), broken) == {IDS[0], IDS[2], IDS[3]}


def test_a_silent_live_site_is_dropped_after_the_peers_report_it():
    sites = ScriptedSites(3)
    rounds = sites.rounds(0, 1, 2)
    calls = [call(sites.sites[i].abort, rounds[i], [2]) for i in (0, 1)]
    sites.until(lambda ledger: len(ledger.broken) == 2)
    assert not any(one.done() for one in calls)
    sites.shared.advance(sites.pace.suspect_s)
    assert [round.weights for round in results(calls)] == [(10, 20), (10, 20)]
    with pytest.raises(LeaseLost):
        sites.sites[2].commit(rounds[2], "d")


def test_a_straggler_is_left_out_after_the_grace_window_and_counts_in_the_next_round():
    sites = ScriptedSites(3, RoundPace(founders=3, quorum=2, grace_s=30.0))
    sites.play(0, 1, 2)
    calls = sites.begin(0, 1)
    sites.shared.advance(29.0)
    assert not sites.ledger.is_exchanging
    sites.shared.advance(1.0)
    rounds = dict(zip((0, 1), results(calls), strict=True))
    straggler = call(sites.sites[2].begin_round, 1, 30, 3600.0)
    assert results(sites.commit(rounds)) == [True, True]
    with pytest.raises(Behind):
        straggler.result(timeout=20)
    assert sites.rounds(2, 0, 1)[0].weights == (10, 20, 30)


def test_a_site_that_joins_opens_no_grace_window_and_waits_for_the_members():
    """Otherwise it would play the round alone, and leave all members behind."""
    sites = ScriptedSites(2, RoundPace(founders=2, quorum=1, grace_s=30.0))
    sites.play(0, 1)
    sites.add(2, msgspec.structs.replace(TERMS, round=0, digest="digest 0"))
    joining = sites.begin(2)
    sites.shared.advance(2 * HOUR_S)  # beyond its deadline
    assert not sites.ledger.is_exchanging
    calls = sites.begin(0)
    sites.shared.advance(29.0)
    assert not sites.ledger.is_exchanging
    found = results([*joining, *calls, *sites.begin(1)])
    assert found[0] == found[1] == found[2] and sorted(found[0].weights) == [10, 20, 30]


def test_a_site_that_waits_says_how_many_have_joined(caplog):
    caplog.set_level("INFO", "orrery.elastic.membership")
    sites = ScriptedSites(1, RoundPace(founders=3))
    for num_joined in (1, 2):
        with pytest.raises(ElasticError, match="1 of 3 sites arrived in round 0"):
            sites.sites[0].begin_round(0, 10, deadline_s=0.0)
        sites.add(num_joined)
    sites.rounds(1, 2, number=0)  # no log line, because all have joined
    assert caplog.messages == [f"round 0: {num} of 3 sites have joined" for num in (1, 2)]


def test_a_round_without_a_quorum_is_held_and_named():
    sites = ScriptedSites(3, RoundPace(founders=3, quorum=2))
    sites.play(0, 1, 2)
    sites.shared.set_live([IDS[0]])
    held = sites.begin(0)[0]
    sites.shared.advance(3600.0)
    with pytest.raises(ElasticError, match="1 of 2 sites arrived in round 1"):
        held.result(timeout=20)


def test_an_exchange_that_falls_below_the_quorum_is_gathered_again():
    ledger, round = exchanging(3)
    ledger = rules.report(ledger, IDS[0], round, [1, 2])
    ledger = rules.settle(ledger, frozenset(IDS[:1]), quorum=2)
    assert not ledger.is_exchanging and ledger.tokens == {IDS[0]: 10}
    assert ledger.number == 0 and ledger.epoch > round.epoch.number


def test_a_site_with_another_digest_is_outvoted():
    sites = ScriptedSites(3)
    rounds = dict(enumerate(sites.rounds(0, 1, 2)))
    wrong = sites.commit({1: rounds.pop(1)}, "bad")[0]
    assert results(sites.commit(rounds, "good")) == [True, True]
    with pytest.raises(LeaseLost):
        wrong.result(timeout=20)
    assert sites.ledger.committed.digest == "good"


def test_two_sites_that_disagree_retry_the_round():
    sites = ScriptedSites(2)
    rounds = sites.rounds(0, 1)
    calls = sites.commit({0: rounds[0]}, "a") + sites.commit({1: rounds[1]}, "b")
    assert results(calls) == [False, False]
    again = sites.rounds(0, 1, number=0)
    assert again[0] == again[1] and again[0].epoch.number > rounds[0].epoch.number
    assert results(sites.commit(dict(enumerate(again)))) == [True, True]


def test_a_commit_whose_answer_was_lost_is_still_a_commit():
    sites = ScriptedSites(2)
    rounds = dict(enumerate(sites.rounds(0, 1)))
    assert results(sites.commit(rounds)) == [True, True]
    assert results(sites.commit(rounds)) == [True, True]


def test_a_run_restarts_from_its_log_with_the_state_of_the_last_round():
    sites = ScriptedSites(2)
    sites.play(0, 1)
    restored = msgspec.json.decode(msgspec.json.encode(sites.ledger), type=Ledger)
    assert restored == sites.ledger
    old = msgspec.structs.replace(TERMS, round=-1)
    with pytest.raises(ElasticError, match="holds the state of round -1"):
        rules.admit(restored, member(5), old, frozenset())
    new = msgspec.structs.replace(TERMS, round=0, digest="digest 0")
    after = rules.admit(restored, member(5), new, frozenset())
    assert after.ids == {IDS[5]} and after.epoch == restored.epoch + 1
    assert after.number == 1


def test_a_site_with_an_old_state_waits_for_one_with_the_newest():
    sites = ScriptedSites(2)
    sites.play(0, 1)
    sites.shared.set_live(())  # all leases end at once
    late = call(sites.sites[0].join, member(0, 1), TERMS)
    newest = msgspec.structs.replace(TERMS, round=0, digest="digest 0")
    sites.sites[1].join(member(1, 1), newest)
    assert late.result(20).members == (member(1, 1),)
    assert [each.member for each in sites.ledger.joining] == [member(0, 1)]


def test_at_most_max_sites_live_sites_take_part_however_many_join_at_once():
    ledger, _ = exchanging(2)
    ledger = rules.admit(ledger, member(2), TERMS, frozenset(IDS[:2]), 3)
    with pytest.raises(ElasticError, match="max_sites 3: that many sites already take part"):
        rules.admit(ledger, member(3), TERMS, frozenset(IDS[:3]), 3)
    lapsed = frozenset({IDS[0], IDS[2]})  # site 1 has lost its lease, and joins again
    assert len(rules.admit(ledger, member(4), TERMS, lapsed, 3).joining) == 2


def test_an_exchange_whose_members_are_all_gone_is_gathered_from_the_sites_that_return():
    ledger, _ = exchanging(2)
    ledger = rules.admit(ledger, member(5), TERMS, frozenset())
    ledger = rules.settle(ledger, frozenset({IDS[5]}))
    ledger = rules.arrive(ledger, IDS[5], 0, 7)
    ledger = rules.start(ledger, frozenset({IDS[5]}))
    assert ledger.open_round(IDS[5]).weights == (7,)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("manifest", "x" * 64, "^manifest: this site has xxxxxxxxxxxx, the run mmmmmmmmmmmm"),
        ("code", "x" * 40, "^code: this site has version"),
        ("codecs", ("float32",), "^trainer.elastic.codec: the run uses int8_block, .* float32"),
        ("memory_bytes", 1 << 20, "^memory: this site has 0.0 GB"),
        ("protocol", 99, "^protocol: this site speaks version 99"),
    ],
)
def test_a_wrong_site_is_refused_at_the_door_and_the_run_goes_on(field, value, sentence):
    sites = ScriptedSites(2)
    sites.play(0, 1)
    before = sites.shared.view
    with pytest.raises(ElasticError, match=sentence) as caught:
        sites.add(2, msgspec.structs.replace(TERMS, **{field: value}))
    assert "\n" not in str(caught.value) and ";" in str(caught.value)
    assert sites.shared.view == before
    sites.play(0, 1)


def test_a_site_with_a_wrong_clock_is_refused_by_its_certificate(tmp_path, monkeypatch):
    make_authority(tmp_path, "run")
    files = make_site(tmp_path, "site")
    opened = partial(EtcdSite, "run", tmp_path, "", files, "127.0.0.1:1", pace=RoundPace())
    opened()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with pytest.raises(ElasticError, match=r"^clock: this host says 1970-01-01 00:00 UTC, .* 2020"):
        opened()


def test_a_write_without_a_lease_is_refused():
    sites = ScriptedSites(1)
    log = ScriptedLog(sites.shared)
    with pytest.raises(LeaseLost):
        log.write(Ledger(), log.read())


@pytest.mark.parametrize("seed", range(8))
def test_random_churn_never_forks_a_round(seed):
    """At any time all sites with the same (round, epoch) have equal members and weights."""
    draw, ledger, live, lives = random.Random(seed), Ledger(), set(), 0
    seen: dict[tuple[int, int], OuterRound] = {}
    committed: dict[int, str] = {}
    for _ in range(600):
        before = ledger
        act = draw.choice(["join", "die", "arrive", "arrive", "start", "ack", "ack", "lose"])
        site = draw.choice(sorted(live)) if live else ""
        round = ledger.open_round(site)
        if act == "join" and len(live) < 6:
            lives += 1
            new = member(lives)
            digest = ledger.committed.digest if ledger.committed else ""
            terms = msgspec.structs.replace(TERMS, round=ledger.last, digest=digest)
            ledger = rules.admit(ledger, new, terms, frozenset(live))
            live.add(new.id)
        elif act == "die" and site and draw.random() < 0.3:
            live.remove(site)
        elif act == "arrive" and site:
            try:
                ledger = rules.arrive(ledger, site, ledger.number, draw.randint(0, 9))
            except LeaseLost:
                live.remove(site)
        elif act == "start":
            ledger = rules.start(ledger, frozenset(live))
        elif act == "ack" and round:
            ledger = rules.acknowledge(ledger, site, round, f"{round.number}")
        elif act == "lose" and round:
            lost = [draw.randrange(len(round.weights))]
            ledger = rules.report(ledger, site, round, lost)
        ledger = rules.settle(ledger, frozenset(live), has_waited=draw.random() < 0.05)
        assert (ledger.last, ledger.epoch) >= (before.last, before.epoch)
        assert ledger.epoch >= before.epoch
        for each in live:
            if round := ledger.open_round(each):
                key = round.number, round.epoch.number
                assert seen.setdefault(key, round) == round
        if ledger.committed:
            row = ledger.committed
            assert committed.setdefault(row.number, row.digest) == row.digest
    assert len(committed) > 10


def test_speeds_open_an_epoch_once_its_ring_is_clearly_faster():
    ledger, _ = exchanging(4)
    live = frozenset(IDS[:4])

    def next_round(ledger: Ledger, speeds: dict[tuple[int, int], int]) -> Ledger:
        for i in range(4):
            opened = ledger.open_round(IDS[i])
            assert opened is not None
            ledger = rules.acknowledge(ledger, IDS[i], opened, "d")
        ledger = rules.settle(ledger, live)
        for i in range(4):
            row = {IDS[j]: speeds.get((min(i, j), max(i, j)), 900) for j in range(4) if j != i}
            ledger = rules.arrive(rules.measure(ledger, IDS[i], row), IDS[i], ledger.number, 1)
        return rules.start(ledger, live)

    even = next_round(ledger, {})
    assert even.epoch == ledger.epoch and even.speeds == ()
    slow = next_round(even, {(0, 1): 100})
    assert slow.epoch == even.epoch + 1 and slow.speeds[0] == (0, 100, 900, 900)
    assert ring_order(slow.current) in {(0, 2, 1, 3), (0, 3, 1, 2)}
    again = next_round(slow, {(0, 1): 100, (0, 2): 950})
    assert again.epoch == slow.epoch and again.speeds == slow.speeds
