"""Record CPU time and memory of a process and its children as metric rows.

- Rows are `{"event": "usage", "processes": {"trainer.0": {"cpu_percent", "rss_bytes"}}}`, every
  PERIOD_S or less often in long runs. 100 % is one core.
- To list children, psutil would read all processes of the host, so this module reads /proc.
- Only roles under a launcher record usage.
"""

import logging
import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from orrery.manifest.errors import explain_os_error
from orrery.runtime.metrics import MetricsFile
from orrery.runtime.timing import period_s

log = logging.getLogger(__name__)

PERIOD_S = 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Stat:
    cpu_s: float
    rss_bytes: int


def parse(stat: str) -> Stat:
    """Parse /proc/<pid>/stat. The process's name may contain spaces and brackets."""
    fields = stat.rpartition(")")[2].split()
    return Stat((int(fields[11]) + int(fields[12])) / TICKS_PER_S, int(fields[21]) * PAGE_BYTES)


def tree(root: int, without: Collection[int] = ()) -> dict[int, Stat]:
    found: dict[int, Stat] = {}
    left = [root]
    while left:
        pid = left.pop()
        try:
            found[pid] = parse(Path(f"/proc/{pid}/stat").read_text())
            for task in os.listdir(f"/proc/{pid}/task"):
                children = map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
                left.extend(child for child in children if child not in without)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


class Sampler:
    def __init__(self, pid: int, without: Collection[int] = ()):
        self._pid, self._without, self._time_s = pid, frozenset(without), time.monotonic()
        self._cpu_s = {pid: each.cpu_s for pid, each in tree(pid, self._without).items()}

    def sample(self) -> dict[str, float]:
        """Return `cpu_percent` since the last sample, new children included, and `rss_bytes`."""
        now_s, found = time.monotonic(), tree(self._pid, self._without)
        used_s = sum(each.cpu_s - self._cpu_s.get(pid, 0.0) for pid, each in found.items())
        percent = 100 * used_s / max(now_s - self._time_s, 1 / TICKS_PER_S)
        self._cpu_s, self._time_s = {pid: each.cpu_s for pid, each in found.items()}, now_s
        return {
            "cpu_percent": round(max(percent, 0.0), 1),
            "rss_bytes": sum(each.rss_bytes for each in found.values()),
        }


class UsageRows:
    def __init__(self, name: str, metrics: MetricsFile, period_s: float = PERIOD_S):
        self._name, self._metrics, self._period_s = name, metrics, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        sampler, begin_s, has_failed = Sampler(os.getpid()), time.monotonic(), False
        while not self._stop.wait(period_s(time.monotonic() - begin_s, self._period_s)):
            try:
                self._metrics.write(event="usage", processes={self._name: sampler.sample()})
            except OSError as error:
                if not has_failed:
                    log.warning(
                        "use of processor and memory cannot be written (%s); tried again",
                        explain_os_error(error),
                    )
                has_failed = True
