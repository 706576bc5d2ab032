"""Run a site's etcd client, and an etcd server if the site is a coordinator.

- Sites with a listener become coordinators one at a time, up to an odd number of at most
  `coordinators`. A coordinator is removed when its site has had no lease for REMOVE_S. A leaving
  site skips this wait if etcd refuses to remove its own coordinator.
- Sites compute equal changes from etcd's data, so they need no leader.
"""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, Self

from orrery.elastic.certificates import Certificates, check_clock
from orrery.elastic.etcd_log import ELECTION_S, EtcdClient, EtcdLog, EtcdRefused, SiteServices
from orrery.elastic.links import PeerLinks
from orrery.elastic.membership import LogMembership, RoundPace
from orrery.elastic.types import ElasticError
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import find_workspace
from orrery.manifest.publish import make_folder, write_atomic
from orrery.runtime.process_control import die_with_parent
from orrery.runtime.timing import HAND_OVER_S

REMOVE_S = 30.0
STOP_S = 5.0
ELECTION_MS = round(ELECTION_S * 250)  # election timeout. A vote takes 1 to 2 timeouts.
LOCAL = ".tools/etcd/usr/bin/etcd"  # where `locks/system.sh elastic` installs etcd in the checkout


class Change(NamedTuple):
    kind: Literal["add", "remove", "none"]
    name: str = ""


def next_change(own: str, voters: Set[str], live: Set[str], gone: Set[str], most: int) -> Change:
    """Return the coordinator that site `own` must add or remove.

    Sites are ADDRESS:PORT. `voters`: coordinators. `live`: live sites that can run etcd. `gone`:
    coordinators to remove. `most`: limit of `voters`.
    """
    target = min(most, len(live))
    target -= target % 2 == 0
    is_steward = own == min(voters & live, default="")
    if gone & voters:
        return Change("remove", min(gone & voters)) if is_steward else Change("none")
    # A leaving site is not live, but may wait in `_hand_over` for another coordinator.
    if len(voters) < target or not voters & live:
        is_next = own == min(live - voters, default="")
        return Change("add", own) if is_next else Change("none")
    if len(voters) > target > 0 and is_steward:
        return Change("remove", max(voters - live or voters))
    return Change("none")


def etcd_program() -> str:
    folders = [Path(__file__).parents[3]]
    with suppress(OrreryError):  # a container has no checkout
        folders.append(find_workspace().root)  # this file may be in a copy of the code
    programs = ("etcd", *(str(folder / LOCAL) for folder in folders))
    found = next(filter(None, map(shutil.which, programs)), None)
    if found is None:
        raise ElasticError(
            "etcd: not installed. An elastic run keeps its state in etcd; type "
            "`bash locks/system.sh elastic`"
        )
    return found


class EtcdServer:
    """An etcd server. `name`: ADDRESS:PORT for clients. Servers use PORT + 1 among themselves."""

    def __init__(self, name: str, folder: Path, certificates: Certificates, run: str) -> None:
        self.name, self._folder, self._run = name, folder, run
        self._certificates = certificates
        self._program = etcd_program()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        return self._folder / "etcd"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, names: Iterable[str] = (), is_new: bool = False) -> None:
        """Start etcd from its data folder, or join the cluster `names` if the folder is empty.

        Set `is_new` only for the run's first server, because a new cluster may replace damaged data
        by an empty log.
        """
        others = set(names) - {self.name}
        files = self._certificates
        cluster = ",".join(f"{each}={peer_url(each)}" for each in sorted({*others, self.name}))
        command = [self._program, f"--name={self.name}", f"--data-dir={self.data}"]
        for kind, url in (("client", f"https://{self.name}"), ("peer", peer_url(self.name))):
            flag = "" if kind == "client" else "peer-"
            announce = (
                "advertise-client-urls" if kind == "client" else "initial-advertise-peer-urls"
            )
            command += [
                *(f"--listen-{kind}-urls={url}", f"--{announce}={url}"),
                *(f"--{flag}trusted-ca-file={files.authority}", f"--{flag}client-cert-auth"),
                *(f"--{flag}cert-file={files.certificate}", f"--{flag}key-file={files.key}"),
            ]
        command += [
            f"--initial-cluster={cluster}",
            f"--initial-cluster-token={self._run}",
            f"--initial-cluster-state={'new' if is_new else 'existing'}",
            f"--heartbeat-interval={ELECTION_MS // 10}",
            f"--election-timeout={ELECTION_MS}",
            "--experimental-peer-skip-client-san-verification",
            "--pre-vote",
            "--auto-compaction-retention=1h",
            "--logger=zap",
            "--log-level=warn",
        ]
        make_folder(self._folder)
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def peer_url(name: str) -> str:
    address, _, port = name.rpartition(":")
    return f"https://{address}:{int(port) + 1}"


class EtcdSite:
    """Manage this site's membership of `run`, and its coordinator (etcd server).

    Addresses are ADDRESS:PORT. `name`: own coordinator ("" behind NAT). `join`: another coordinator
    ("" at the first site). `snapshots`: own snapshot server.
    """

    def __init__(
        self,
        run: str,
        folder: Path,
        name: str,
        certificates: Certificates,
        join: str = "",
        *,
        pace: RoundPace,
        snapshots: str = "",
        heartbeat_s: float = 2.0,
        dead_s: float = 10.0,
        store_s: float = 300.0,
        coordinators: int = 5,
    ) -> None:
        check_clock(*certificates.validity())
        self._folder, self._name, self._most = folder, name, coordinators
        self._heartbeat_s = heartbeat_s
        known = [join] if join else [name]
        self._known_file = folder / "coordinators.json"
        with suppress(OSError, ValueError):
            known += [
                each for each in json.loads(self._known_file.read_text()) if each not in known
            ]
        self._is_new = known == [name]
        self.client = EtcdClient(known, certificates, store_s)
        self.log = EtcdLog(self.client, run, heartbeat_s, dead_s, SiteServices(name, snapshots))
        self._snapshots = snapshots
        self.membership = LogMembership(self.log, pace)
        self.server = EtcdServer(name, folder, certificates, run) if name else None
        self.links: PeerLinks | None = None  # `_run` ends a round if a member's lease ends
        self._missing_since_s: dict[str, float] = {}
        self._stop = threading.Event()
        self._steward = threading.Thread(target=self._run, name="coordinators", daemon=True)
        self._ready = threading.Event()
        self._failure: OSError | None = None

    def __enter__(self) -> Self:
        """Raise OSError if etcd cannot start."""
        self._steward.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self.membership.leave()
        has_left = self._hand_over()  # calls etcd, so before `server.stop`
        self._stop.set()
        self._steward.join(STOP_S)
        if self.server is not None:
            self.server.stop()
            if has_left:
                shutil.rmtree(self.server.data, ignore_errors=True)
        self.client.close()

    def _hand_over(self) -> bool:
        """Remove this site's coordinator. Return whether it was removed.

        The last coordinator waits for another if other sites are live. Retry, because etcd may
        refuse until its members were connected for 5 s.
        """
        end_s = time.monotonic() + HAND_OVER_S
        while self.server is not None and self.server.is_running and time.monotonic() < end_s:
            with suppress(ElasticError, EtcdRefused):
                members = self._members()
                if self._name not in members:
                    return True
                if voters := _voters(members) - {self._name}:
                    try:
                        self._remove(members[self._name])
                    except (ElasticError, EtcdRefused):
                        self._remove_dead(members, voters)
                        raise
                    return True
                if not self._live() - {self._name}:
                    return False
            time.sleep(self._heartbeat_s / 4)
        return False

    def _remove_dead(self, members: Mapping[str, tuple[str, bool]], voters: Set[str]) -> None:
        """Remove coordinators of dead and leaving sites, so that etcd then removes this site's own.

        etcd refuses removals that leave no running majority.
        """
        for name in sorted(voters - self._live()):
            with suppress(ElasticError, EtcdRefused):
                self._remove(members[name])

    def _live(self) -> set[str]:
        return {each.coordinator for each in self.log.services(self._heartbeat_s)} - {""}

    def donors(self) -> list[str]:
        """Return other live sites' snapshot servers (ADDRESS:PORT)."""
        found = {each.snapshots for each in self.log.services()}
        return sorted(found - {"", self._snapshots})

    def _run(self) -> None:
        """Start etcd, then manage coordinators. etcd ends with this thread."""
        try:
            if self.server is not None and (self._is_new or self.server.data.exists()):
                self.server.start(is_new=self._is_new)
        except OSError as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        while not self._stop.wait(self._heartbeat_s):
            with suppress(ElasticError, EtcdRefused, OSError):
                self._step()  # OSError: the server cannot start
            with suppress(ElasticError, EtcdRefused, OSError):
                if self.links is not None and (current := self.links.current) is not None:
                    self.links.keep_leased(self.log.live(self._heartbeat_s), current)

    def _step(self) -> None:
        if self.server is not None and self.server.data.exists() and not self.server.is_running:
            self.server.start()  # the calls below may need this server
        members = self._members()
        voters = _voters(members)
        if voters != set(self.client.endpoints):
            self.client.use(sorted(voters))
            write_atomic(self._known_file, json.dumps(sorted(voters)).encode())
        if self.server is None:
            return
        if self._name in members:
            if not self.server.is_running and not self.server.data.exists():
                self._remove(members[self._name])  # etcd rejects a member that lost its data
                return
            self._keep_own(*members[self._name], members)
        elif self.server.data.exists():
            self.server.stop()
            shutil.rmtree(self.server.data)
        live, now_s = self._live(), time.monotonic()
        missing = {name for name in members if name not in live}
        self._missing_since_s = {
            name: self._missing_since_s.get(name, now_s) for name in sorted(missing)
        }
        gone = {
            name for name, since_s in self._missing_since_s.items() if now_s - since_s > REMOVE_S
        }
        change = next_change(self._name, set(members), live, gone, self._most)
        if change.kind == "add":
            added = {"peerURLs": [peer_url(self._name)], "isLearner": True}
            self.client.call("/v3/cluster/member/add", added, self._heartbeat_s)
            self.server.start({*members, self._name})
        elif change.kind == "remove" and voters - {change.name}:
            self._remove(members[change.name])

    def _keep_own(self, member_id: str, is_learner: bool, names: Iterable[str]) -> None:
        assert self.server is not None
        if not self.server.is_running:
            self.server.start(names)
        elif is_learner:
            with suppress(EtcdRefused, ElasticError):
                self.client.call("/v3/cluster/member/promote", {"ID": member_id}, 0.0)

    def _members(self) -> dict[str, tuple[str, bool]]:
        """Return {ADDRESS:PORT: (id, is learner)} of etcd's members."""
        answer = self.client.call("/v3/cluster/member/list", {}, self._heartbeat_s)
        return {
            _name_of(each["peerURLs"][0]): (each["ID"], each.get("isLearner", False))
            for each in answer["members"]
        }

    def _remove(self, member: tuple[str, bool]) -> None:
        self.client.call("/v3/cluster/member/remove", {"ID": member[0]}, self._heartbeat_s)


def _voters(members: Mapping[str, tuple[str, bool]]) -> set[str]:
    return {name for name, (_, is_learner) in members.items() if not is_learner}


def _name_of(url: str) -> str:
    address, _, port = url.removeprefix("https://").rpartition(":")
    return f"{address}:{int(port) - 1}"
