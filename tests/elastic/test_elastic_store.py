"""The real log: sites as processes, etcd with mutual TLS, signals instead of a script."""

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from store_sites import StoreSites

from orrery.elastic import etcd_site
from orrery.elastic.certificates import Certificates, make_authority, make_site
from orrery.elastic.etcd_log import (
    NOT_FOUND,
    EtcdClient,
    EtcdLog,
    EtcdRefused,
    SiteServices,
    check_first,
)
from orrery.elastic.etcd_site import Change, EtcdServer, EtcdSite, next_change
from orrery.elastic.membership import RoundPace
from orrery.elastic.types import ElasticError
from orrery.runtime.timing import HAND_OVER_S

A, B, C, D, E, F = "a", "b", "c", "d", "e", "f"


@pytest.mark.slow
def test_sites_go_on_without_any_one_coordinator_and_fence_a_paused_site(tmp_path):
    with StoreSites(tmp_path, 3, founders=3, dead_s=7.0, heartbeat_s=0.5) as sites:
        for index, skew_s in enumerate([0.0, 60.0, -60.0]):
            sites.start(index, skew_s=skew_s)
        sites.go_on(0, 1, 2)
        sites.until_voters(3)

        # A coordinator dies: no site is lost, and etcd starts again from its data.
        os.kill(sites.of(0, "etcd")[0]["pid"], signal.SIGKILL)
        sites.go_on(0, 1, 2)
        assert not any(sites.of(index, "fenced") for index in range(3))

        # A paused site is left out, and returns under another id with weight 0.
        first = sites.of(2, "joined")[0]["site"]
        os.kill(sites.processes[2].pid, signal.SIGSTOP)
        sites.until(lambda: first not in sites.of(0, "round")[-1]["members"])
        os.kill(sites.processes[2].pid, signal.SIGCONT)
        sites.until(lambda: len(sites.of(2, "joined")) == 2)
        second = sites.of(2, "joined")[1]["site"]
        sites.until(lambda: second in sites.of(0, "round")[-1]["members"])
        assert len(sites.of(2, "fenced")) == 1

        assert sites.forks() == []
        client = EtcdClient(sites.names, Certificates.of(tmp_path, "test"), 20.0)
        rows = list(EtcdLog(client, "run", 1.0, 5.0, SiteServices()).rounds())
        assert [row.number for row in rows] == list(range(len(rows)))

        stranger = tmp_path / "stranger"
        make_authority(stranger, "run")
        outside = EtcdClient(sites.names, make_site(stranger, "test"), 20.0)
        with pytest.raises(ElasticError, match="have certificates of different authorities"):
            outside.call("/v3/cluster/member/list", {})
        other = EtcdLog(client, "other", 1.0, 5.0, SiteServices())
        with pytest.raises(ElasticError, match="other sites have run run, and this site has other"):
            other.read()


def test_only_a_first_answer_can_be_final():
    unknown = socket.gaierror(socket.EAI_NONAME, "unknown")
    with pytest.raises(ElasticError, match="nohost:29400: no such host; type `orrery join"):
        check_first("nohost:29400", unknown)
    for passing in (
        socket.gaierror(socket.EAI_AGAIN, "later"),
        ConnectionRefusedError(),
        OSError(),
    ):
        check_first("nohost:29400", passing)


@pytest.mark.slow
def test_the_first_site_leaves_its_log_to_another_and_returns_to_it(tmp_path):
    with StoreSites(tmp_path, 2) as sites:
        sites.start(0)
        sites.start(1)
        sites.go_on(0, 1)
        assert list(sites.voters()) == sites.names[:1]
        sites.leave(0)
        sites.go_on(1)
        sites.start(0)
        sites.until(lambda: len(sites.of(0, "joined")) == 2)
        sites.go_on(0, 1)
        assert len(sites.of(1, "round")[-1]["members"]) == 2
        assert sites.forks() == [] and not sites.of(1, "fenced")


@pytest.mark.slow
def test_sites_leave_soon_after_another_coordinator_died(tmp_path):
    with StoreSites(tmp_path, 3, dead_s=7.0, heartbeat_s=0.5) as sites:
        for index in range(3):
            sites.start(index)
        sites.until_voters(3)
        sites.go_on(0, 1, 2)
        sites.processes[0].kill()
        begin_s = time.monotonic()
        sites.go_on(1, 2)
        for process in sites.processes[1:]:  # as at the end of a run
            process.send_signal(signal.SIGINT)
        for process in sites.processes[1:]:
            process.wait(60)
        assert time.monotonic() - begin_s < 0.8 * HAND_OVER_S


@pytest.mark.slow
def test_a_coordinator_that_lost_its_data_is_replaced(tmp_path):
    with StoreSites(tmp_path, 3) as sites:
        for index in range(3):
            sites.start(index)
        sites.until_voters(3)
        before = sites.voters()
        sites.processes[0].kill()
        sites.processes[0].wait()
        shutil.rmtree(tmp_path / "site0/etcd")
        sites.start(0)
        sites.until(lambda: len(sites.of(0, "joined")) == 2)
        sites.go_on(0, 1, 2)
        sites.until_voters(3)
        assert sites.voters()[sites.names[0]] != before[sites.names[0]]
        assert sites.forks() == []


@pytest.mark.parametrize(
    ("own", "voters", "live", "gone", "change"),
    [
        (B, {A}, {A, B}, set(), Change("none")),  # two would be worse than one
        (B, {A}, {A, B, C}, set(), Change("add", B)),
        (C, {A}, {A, B, C}, set(), Change("none")),  # B is first
        (C, {A, B}, {A, B, C}, set(), Change("add", C)),
        (D, {A, B, C}, {A, B, C, D}, set(), Change("none")),
        (F, {A, B, C, D, E}, {A, B, C, D, E, F}, set(), Change("none")),
        (B, {A, B, C}, {B, C, D}, {A}, Change("remove", A)),
        (C, {A, B, C}, {B, C, D}, {A}, Change("none")),
        (D, {B, C}, {B, C, D}, set(), Change("add", D)),
        (A, {A, B}, {A, B}, set(), Change("remove", B)),
        (A, {A, B, C, D, E}, {A, C, D, E}, set(), Change("remove", B)),  # the dead one first
        (A, {A}, {A}, set(), Change("none")),
        (A, {A}, set(), set(), Change("none")),
        (B, {A}, {B}, set(), Change("add", B)),  # A leaves
        (A, {A}, {B}, set(), Change("none")),
    ],
)
def test_coordinators_are_an_odd_number_of_live_sites(own, voters, live, gone, change):
    assert next_change(own, voters, live, gone, most=5) == change


class SlowEtcd:
    """An etcd whose first lease ends before the site's key is written."""

    def __init__(self) -> None:
        self.num_leases = 0

    def call(self, path: str, body: dict, within_s: float | None = None) -> dict:
        if path == "/v3/lease/grant":
            self.num_leases += 1
            return {"ID": str(self.num_leases)}
        if path == "/v3/kv/put" and body["lease"] == "1":
            raise EtcdRefused(NOT_FOUND, "requested lease not found")
        return {"kvs": [{"create_revision": "7"}]} if path == "/v3/kv/range" else {}

    def stream(self, *_: object) -> Iterator[dict]:
        return iter(())


def test_a_site_takes_another_lease_if_the_first_ends_at_once():
    etcd = SlowEtcd()
    log = EtcdLog(etcd, "run", 60.0, 120.0, SiteServices())
    log.acquire("site")
    log.release()
    assert etcd.num_leases == 2


def test_a_site_that_cannot_start_etcd_ends(tmp_path, monkeypatch):
    make_authority(tmp_path, "run")
    site = ["run", tmp_path, "127.0.0.1:1", make_site(tmp_path, "site")]
    pace = RoundPace()

    def fails(*_, **__):
        raise PermissionError("etcd")

    monkeypatch.setattr(EtcdServer, "start", fails)
    with pytest.raises(PermissionError, match="etcd"), EtcdSite(*site, pace=pace):
        pass
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(etcd_site, "__file__", "/run/code/digest/orrery/elastic/etcd_site.py")
    (tmp_path / "jsonnet/runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ElasticError, match=r"type `bash locks/system\.sh elastic`"):
        EtcdSite(*site, pace=pace)


def test_etcd_is_found_in_the_checkout_that_a_copy_of_the_code_was_made_from(tmp_path, monkeypatch):
    program = tmp_path / etcd_site.LOCAL
    for folder in (tmp_path / "jsonnet/runs", program.parent):
        folder.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(etcd_site, "__file__", "/run/code/digest/orrery/elastic/etcd_site.py")
    monkeypatch.chdir(tmp_path)
    assert etcd_site.etcd_program() == str(program)
