"""Usage: processor time and memory of every process with everything that it started, but for what has a name of its own."""

import psutil


class UsageSampler:
    """Keeps psutil's process objects, since `cpu_percent` is a difference between two looks at the same one."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def sample(self, pids: dict[str, int]) -> dict[str, dict[str, float]]:
        """By name: `cpu_percent` of one core since the last look (100 is one core busy) and `rss_bytes`, summed over the process tree.

        A named process inside another's tree (a role below the launcher) counts for itself only.
        """
        result: dict[str, dict[str, float]] = {}
        seen: dict[int, psutil.Process] = {}
        for name, pid in pids.items():
            cpu_percent, rss_bytes = 0.0, 0
            for process in self._tree(pid, set(pids.values()) - {pid}):
                process = self._known.get(process.pid, process)
                try:
                    with process.oneshot():
                        cpu_percent += process.cpu_percent()
                        rss_bytes += process.memory_info().rss
                    seen[process.pid] = process
                except psutil.Error:
                    continue  # it ended between the two looks
            if rss_bytes:
                result[name] = {"cpu_percent": round(cpu_percent, 1), "rss_bytes": rss_bytes}
        self._known = seen
        return result

    def _tree(self, pid: int, others: set[int]) -> list[psutil.Process]:
        try:
            root = self._known.get(pid) or psutil.Process(pid)
            below = [child for child in root.children() if child.pid not in others]
        except psutil.Error:
            return []
        return [root, *(process for child in below for process in self._tree(child.pid, others))]
