"""Network namespaces on a bridge, with NAT, rates and delays, for tests and benchmarks. As root."""

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

PUBLIC = "203.0.113"
PRIVATE = "10.1.0"  # the same behind every router


def lacking() -> str:
    """Return why namespaces cannot be made here, or ""."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [each for each in ("ip", "nft", "tc") if shutil.which(each) is None]
    return f"namespaces need {', '.join(missing)}" if missing else ""


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def enter(space: str) -> None:
    """Move this thread into a namespace."""
    with Path(f"/run/netns/{space}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


class Networks:
    """Use it as a context manager. Namespaces that a killed process left are removed first."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Self:
        self._remove()
        run("ip", "link", "add", self.name, "type", "bridge")
        run("ip", "link", "set", self.name, "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        for device in Path("/sys/class/net").glob(f"{self.name}[0-9]*"):
            # The kernel deletes the devices of a namespace some time after it.
            subprocess.run(["ip", "link", "del", device.name], capture_output=True)
        found = Path("/run/netns")
        for space in found.iterdir() if found.exists() else ():
            if space.name.startswith(f"{self.name}-"):
                subprocess.run(["ip", "netns", "del", space.name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.name], capture_output=True)

    def public(self, number: int) -> str:
        """Make a namespace on the bridge. Return its name. Its address is PUBLIC.`number`."""
        space = self._space(str(number))
        outside = f"{self.name}{number}"
        run("ip", "link", "add", "e0", "netns", space, *["type", "veth", "peer", "name"], outside)
        run("ip", "link", "set", outside, "master", self.name, "up")
        self._up(space, "e0", f"{PUBLIC}.{number}/24")
        return space

    def private(self, number: int) -> str:
        """Make a namespace behind a router that masquerades as PUBLIC.`number`. Return its name."""
        router, space = self.public(number), self._space(f"{number}-in")
        run(
            "ip", "link", "add", "e0", "netns", space, "type", "veth", "peer", "e1", "netns", router
        )
        self._up(space, "e0", f"{PRIVATE}.2/24")
        self._up(router, "e1", f"{PRIVATE}.1/24")
        run("ip", "-n", space, "route", "add", "default", "via", f"{PRIVATE}.1")
        inside = ("ip", "netns", "exec", router)
        run(*inside, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        rules = (
            "table ip nat { chain out { type nat hook postrouting priority 100; "
            "oifname e0 masquerade; }; chain in { type filter hook forward priority 0; "
            "iifname e0 ct state new drop; }; }"
        )
        run(*inside, "nft", rules)
        return space

    def empty(self, number: int) -> str:
        """Make a namespace without a device. Return its name."""
        return self._space(str(number))

    def lose(self, space: str, share: float) -> None:
        """Drop a random `share` of the packets that the namespace sends."""
        rules = (
            "table ip loss { chain out { type filter hook output priority 0; "
            f"meta oifname e0 numgen random mod 100000 < {round(1e5 * share)} drop; }}; }}"
        )
        run("ip", "netns", "exec", space, "nft", rules)

    def limit(self, space: str, rate: int, queue_ms: int = 50) -> None:
        """Let the namespace send `rate` Mb/s at most, with a queue of `queue_ms` before drops."""
        burst = f"{max(70, rate // 4)}kb"  # of a packet before TCP is cut, at least
        words = ("tbf", "rate", f"{rate}mbit", "burst", burst, "latency", f"{queue_ms}ms")
        run("tc", "-n", space, "qdisc", "replace", "dev", "e0", "root", *words)

    def limit_edge(self, a: str, b: int, rate: int) -> None:
        """Drop what namespace `a` sends to PUBLIC.`b` above `rate` Mb/s."""
        over = f"limit rate over {rate * 125} kbytes/second burst {rate * 25} kbytes drop"
        rules = (
            "table ip edge { chain out { type filter hook output priority 0; "
            f"ip daddr {PUBLIC}.{b} {over}; }}; }}"
        )
        run("ip", "netns", "exec", a, "nft", rules)

    def sent_bytes(self, space: str) -> int:
        file = "/sys/class/net/e0/statistics/tx_bytes"
        words = ("ip", "netns", "exec", space, "cat", file)
        return int(subprocess.run(words, capture_output=True, check=True).stdout)

    def _space(self, name: str) -> str:
        space = f"{self.name}-{name}"
        run("ip", "netns", "add", space)
        with suppress(RuntimeError):
            run("ip", "-n", space, "link", "set", "lo", "up")
        return space

    def _up(self, space: str, device: str, address: str) -> None:
        run("ip", "-n", space, "addr", "add", address, "dev", device)
        run("ip", "-n", space, "link", "set", device, "up")
