"""Measure how long 8 sites in network namespaces stand still after a loss. As root.

Rows: the leading coordinator's process is killed, its whole site is killed, and partitions 4:4 and
5:3 with the leading coordinator on the smaller side. The value is the time from the loss to the
end of the next round of the sites that go on.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests/elastic")]
from store_sites import StoreSites  # noqa: E402

from record import parser_of, record  # noqa: E402

COUNT, VOTERS = 8, 5
HOSTS = [f"10.78.0.{i + 1}" for i in range(COUNT)]
BRIDGES = ("sites0", "sites1")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Connect the namespaces site0 … site7 by a bridge. A second bridge is for cut-off sites.

    Wait for other benchmarks that use the namespaces.
    """
    with Path("/tmp/orrery-network.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _namespaces():
            yield


@contextlib.contextmanager
def _namespaces() -> Iterator[None]:
    try:
        for bridge in BRIDGES:
            ip("link", "add", bridge, "type", "bridge")
            ip("link", "set", bridge, "up")
        ip("address", "add", "10.78.0.254/24", "dev", BRIDGES[0])
        for i, host in enumerate(HOSTS):
            ip("netns", "add", f"site{i}")
            ip("link", "add", f"side{i}", "type", "veth", "peer", "name", "e0", "netns", f"site{i}")
            ip("link", "set", f"side{i}", "master", BRIDGES[0], "up")
            for words in (f"address add {host}/24 dev e0", "link set e0 up", "link set lo up"):
                ip("-n", f"site{i}", *words.split())
        yield
    finally:
        for i in range(COUNT):  # a link stays if a process keeps its namespace
            subprocess.run(["ip", "link", "delete", f"side{i}"], check=False)
            subprocess.run(["ip", "netns", "delete", f"site{i}"], check=False)
        for bridge in BRIDGES:
            subprocess.run(["ip", "link", "delete", bridge], check=False)


def leader(sites: StoreSites) -> int:
    """Return the index of the site whose coordinator leads, once one is elected."""
    end_s = time.monotonic() + 30.0
    while time.monotonic() < end_s:
        chosen = sites.client.call("/v3/maintenance/status", {}).get("leader")
        for name, id in sites.voters().items():
            if id == chosen:
                return int(sites.names.index(name))
        time.sleep(0.2)
    raise SystemExit("error: the coordinators elect no leader; read etcd.log of the sites")


def until_round(sites: StoreSites, after_s: float, kept: list[int], size: int) -> float:
    """Return when all `kept` sites had finished a round of `size` sites begun after `after_s`."""

    def found() -> float:
        ends = [
            [
                e["at_s"]
                for e in sites.of(i, "round")
                if len(e["members"]) == size and e["at_s"] > after_s
            ]
            for i in kept
        ]
        return max(each[0] for each in ends) if all(ends) else 0.0

    return float(sites.until(found, 90.0))


def coordinator_of(sites: StoreSites, index: int) -> int:
    found = subprocess.run(
        ["pgrep", "-f", f"etcd --name={sites.names[index]} "], capture_output=True, text=True
    )
    return int(found.stdout.split()[0])


def lost_sites(sites: StoreSites, first: int, count: int) -> list[int]:
    """Return `first` and other sites, together with a minority of the coordinators."""
    voters = [sites.names.index(name) for name in sites.voters()]
    rest = [i for i in range(COUNT) if i not in voters]
    return [first, *[i for i in voters if i != first][: VOTERS // 2 - 1], *rest][:count]


def main() -> None:
    parser_of(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    with (
        network(),
        tempfile.TemporaryDirectory() as folder,
        StoreSites(Path(folder), COUNT, HOSTS, founders=COUNT, pause_s=0.5) as sites,
    ):
        for index in range(COUNT):
            sites.start(index)
        every = list(range(COUNT))
        for size in (0, 4, 3):
            sites.until_voters(VOTERS)  # wait until lost ones are replaced
            first = leader(sites)
            lost = lost_sites(sites, first, size)
            kept = [i for i in every if i not in lost]
            begin_s = time.monotonic()
            if size == 0:
                os.kill(coordinator_of(sites, first), signal.SIGKILL)
            for i in lost:
                ip("link", "set", f"side{i}", "master", BRIDGES[1])
            stop_s = until_round(sites, begin_s + 0.7, kept, len(kept)) - begin_s
            heal_s = time.monotonic()
            for i in lost:
                ip("link", "set", f"side{i}", "master", BRIDGES[0])
            back_s = until_round(sites, heal_s, every, COUNT) - heal_s if lost else 0.0
            name = f"partition {COUNT - size}:{size}" if size else "coordinator killed"
            rows.append({"variant": name, "value": stop_s, "unit": "s", "rejoined_s": back_s})
            print(rows[-1], flush=True)
        sites.until_voters(VOTERS)
        first = leader(sites)
        begin_s = time.monotonic()
        os.kill(coordinator_of(sites, first), signal.SIGKILL)
        sites.processes[first].kill()
        kept = [i for i in every if i != first]
        stop_s = until_round(sites, begin_s, kept, COUNT - 1) - begin_s
        rows.append({"variant": "site of the leader killed", "value": stop_s, "unit": "s"})
        print(rows[-1], flush=True)
        forks = sites.forks()
    assert forks == [], forks
    record(
        Path(__file__).with_suffix(".json"),
        figure="elastic/failover",
        value=max(row["value"] for row in rows),
        unit="s",
        goal=10.0,
        better="lower",
        rows=rows,
        details={"sites": COUNT, "coordinators": VOTERS, "rounds_forked": len(forks)},
    )


if __name__ == "__main__":
    main()
