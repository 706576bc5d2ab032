"""The defects of prime's elastic training, one test each. Numbers are as in the notes."""

import ast
import time
from pathlib import Path

import pytest
from scripted import ScriptedEvent, ScriptedMembership
from scripted_sites import HOUR_S, TERMS, ScriptedSites, call, member, results
from store_sites import StoreSites

from orrery.elastic.snapshots import (
    FolderSource,
    assemble,
    copy_state,
    publish_copies,
    published,
    read_header,
    remove_old,
    verify,
)
from orrery.elastic.types import ElasticError, LeaseLost, OuterRound


def test_1_a_slow_peer_is_evicted_by_id_and_may_return():
    sites = ScriptedSites(3)
    sites.play(0, 1, 2)
    rounds = sites.rounds(0, 1, 2)
    calls = [call(sites.sites[i].abort, rounds[i], [2]) for i in (0, 1)]
    sites.until(lambda ledger: len(ledger.broken) == 2)
    sites.shared.advance(sites.pace.suspect_s)
    assert [len(each.weights) for each in results(calls)] == [2, 2]
    with pytest.raises(LeaseLost):
        sites.sites[2].begin_round(1, 30, HOUR_S)
    results(sites.commit({0: calls[0].result(), 1: calls[1].result()}))
    sites.sites[2].join(member(2, life=1), TERMS)
    assert len(sites.rounds(2, 0, 1)[0].weights) == 3


@pytest.mark.slow
def test_2_the_first_site_and_its_coordinator_die_and_the_others_go_on(tmp_path):
    with StoreSites(tmp_path, 3, founders=3, dead_s=7.0, heartbeat_s=0.5) as sites:
        for index in range(3):
            sites.start(index)
        sites.until_voters(3)
        sites.processes[0].kill()
        sites.go_on(1, 2)
        assert len(sites.of(1, "round")[-1]["members"]) == 2
        assert sites.forks() == []


def test_3_no_wall_clock_is_read(monkeypatch):
    def read() -> float:
        raise AssertionError("a wall clock was read")

    monkeypatch.setattr(time, "time", read)
    sites = ScriptedSites(2)
    sites.play(0, 1)
    sites.sites[1].leave()
    sites.play(0)


def test_4_the_divisor_of_a_retry_is_the_weight_of_the_survivors():
    sites = ScriptedSites(3, trace=[ScriptedEvent("crash", 2, 0, "exchange")])
    begun = sites.begin(0, 1, 2)
    again = [call(sites.sites[i].abort, begun[i].result(timeout=20), [2]) for i in (0, 1)]
    assert [sum(each.weights) for each in results(again)] == [10 + 20, 10 + 20]


def test_6_sites_never_disagree_about_the_members_of_a_round():
    trace = [
        ScriptedEvent("pause", 1, 3, "exchange"),
        ScriptedEvent("pause", 2, 5, "commit"),
        ScriptedEvent("pause", 3, 5, "arrive"),
    ]
    sites = ScriptedSites(4, trace=trace)
    seen: list[list[OuterRound]] = [[], [], [], []]

    def run(site: ScriptedMembership, rounds: list[OuterRound]) -> None:
        number = 0
        try:
            while number < 12:
                found = site.begin_round(number, 10, HOUR_S)
                rounds.append(found)
                number += site.commit(found, str(number))
        except LeaseLost:
            return

    results([call(run, site, seen[i]) for i, site in enumerate(sites.sites)])
    by_key: dict[tuple[int, int], OuterRound] = {}
    for found in (each for rounds in seen for each in rounds):
        assert by_key.setdefault((found.number, found.epoch.number), found) == found
    assert sites.ledger.last == 11 and len(sites.ledger.members) == 1


def test_8_a_killed_save_leaves_the_newest_complete_snapshot_and_old_ones_go(tmp_path):
    memory, disk = tmp_path / "memory", tmp_path / "disk"

    def snapshot(number: int) -> Path:
        copy_state(memory, number, "d", {"theta": bytes([number]) * 9000}, block_bytes=1000)
        return publish_copies(memory, keep=2)[0]

    def save(found: Path) -> None:
        assemble(read_header(found), disk, [FolderSource(found)])
        remove_old(disk, keep=2)

    for number in range(1, 4):
        save(snapshot(number))
    newest = snapshot(4)
    (newest / "theta").write_bytes(bytes(9000))  # the save ends before its last rename
    with pytest.raises(ElasticError):
        save(newest)
    assert [verify(each).round for each in published(disk)] == [2, 3]
    (newest / "theta").write_bytes(bytes([4]) * 9000)
    save(newest)
    assert [verify(each).round for each in published(disk)] == [3, 4]


def test_9_no_module_of_these_tests_is_skipped_as_a_whole():
    words = {"allow_module_level", "pytestmark", "importorskip", "collect_ignore"}
    found = [
        f"{path.name}: {name}"
        for path in Path(__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (getattr(node, "arg", ""), getattr(node, "id", ""), getattr(node, "attr", ""))
        if name in words
    ]
    assert found == []
