"""Sites of a real log as processes on loopback, for tests and benchmarks."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orrery.elastic.certificates import Certificates, make_authority, make_site
from orrery.elastic.etcd_log import EtcdClient
from orrery.runtime.network import LOOPBACK, free_ports

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


class StoreSites:
    """Use it as a context manager. `events` holds every site's events so far."""

    def __init__(
        self, folder: Path, count: int, hosts: Sequence[str] = (), **options: float
    ) -> None:
        """Put site i into the network namespace site`i` with address hosts[i], if there are any."""
        subprocess.run(["bash", "locks/system.sh", "elastic"], cwd=ROOT, check=True)
        self.folder, self.options = folder, options
        make_authority(folder, "run")
        found = iter(free_ports(200))
        ports: list[int] = []  # each followed by a free port, for etcd's peers
        while len(ports) < count:
            port = next(found)
            if port + 1 not in ports and port - 1 not in ports:
                ports.append(port)
        self.hosts = hosts
        self.names = [f"{hosts[i] if hosts else LOOPBACK}:{p}" for i, p in enumerate(ports)]
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self.changed = threading.Condition()
        self.processes: list[subprocess.Popen[str]] = []
        make_site(folder, "test")
        self.client = EtcdClient(self.names, Certificates.of(folder, "test"), DEADLINE_S)

    def __enter__(self) -> "StoreSites":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def start(self, index: int, **options: float) -> None:
        if not (self.folder / f"site{index}.key").exists():  # a site that returns has one
            make_site(self.folder, f"site{index}", self.hosts[index : index + 1])
        join = self.names[0] if index else ""
        script = Path(__file__).with_name("store_site.py")
        told = json.dumps(self.options | options)
        command = [sys.executable, script, self.folder, f"site{index}", self.names[index], join]
        inside = ["ip", "netns", "exec", f"site{index}"] if self.hosts else []
        process = subprocess.Popen([*inside, *command, told], stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        threading.Thread(target=self._read, args=(index, process), daemon=True).start()

    def leave(self, index: int) -> None:
        """End a site as Ctrl-C does."""
        self.processes[index].send_signal(signal.SIGINT)
        self.processes[index].wait(DEADLINE_S)

    def _read(self, index: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self.changed:
                self.events[index].append(json.loads(line))
                self.changed.notify_all()

    def until(self, holds: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """Return what `holds` returns, once it is true."""
        with self.changed:
            assert self.changed.wait_for(holds, deadline_s), [each[-2:] for each in self.events]
            return holds()

    def of(self, index: int, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events[index] if each["event"] == event]

    def num_rounds(self, index: int) -> int:
        return len(self.of(index, "round"))

    def go_on(self, *indices: int, num_rounds: int = 2) -> None:
        """Wait until sites have finished more rounds."""
        before = {index: self.num_rounds(index) for index in indices}
        self.until(lambda: all(self.num_rounds(i) >= before[i] + num_rounds for i in indices))

    def voters(self) -> dict[str, str]:
        """Return {ADDRESS:PORT: etcd's id}."""
        members = self.client.call("/v3/cluster/member/list", {})["members"]
        return {
            each["clientURLs"][0].removeprefix("https://"): each["ID"]
            for each in members
            if each.get("clientURLs") and not each.get("isLearner")
        }

    def until_voters(self, count: int) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while len(self.voters()) != count:
            assert time.monotonic() < end_s, self.voters()
            with self.changed:
                self.changed.wait(0.2)

    def forks(self) -> list[int]:
        """Return the rounds that two sites finished with other members, weights or epochs."""
        seen: dict[int, dict[str, Any]] = {}
        found = []
        for events in self.events:
            for each in events:
                if each["event"] == "round":
                    row = {key: value for key, value in each.items() if key != "at_s"}
                    if seen.setdefault(each["number"], row) != row:
                        found.append(each["number"])
        return found
