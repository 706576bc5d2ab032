"""Network: where a role listens, and which address of it others are told.

- In: `ORRERY_INTERFACE`, the name of a network interface; without it everything is on loopback, for the roles of one machine.
- Out: that interface's IPv4 address, for sockets and published addresses, and its name, for libraries that want names.
- Ports that are free now, for who must say one before its owner binds it.
- Never: all interfaces at once. A role listens where the run's other roles come from, and nowhere else.
"""

import os
import random
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import psutil

from orrery.manifest.errors import OrreryError, RunFailed

INTERFACE = "ORRERY_INTERFACE"
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
RDMA_DEVICES = Path("/sys/class/infiniband")
PORTS = range(
    20_000, 32_768
)  # below the kernel's ephemeral range, so that no outgoing connection takes a port before its owner binds it


def interface() -> str:
    """The interface that this process is to use."""
    return os.environ.get(INTERFACE) or LOOPBACK_INTERFACE


def address() -> str:
    """The IPv4 address of `interface()`. Raises `OrreryError` where there is no such interface, or it has none."""
    name = interface()
    if name == LOOPBACK_INTERFACE:
        return LOOPBACK
    found = {
        each: [one.address for one in addresses if one.family == socket.AF_INET]
        for each, addresses in psutil.net_if_addrs().items()
    }
    if not found.get(name):
        usable = ", ".join(
            f"{each} ({', '.join(addresses)})"
            for each, addresses in sorted(found.items())
            if addresses
        )
        raise OrreryError(
            f"{INTERFACE}: {name} is not an interface with an IPv4 address on {socket.gethostname()}; "
            f"it has {usable or 'none'}; set [network] interface in the site file to one that every node has"
        )
    return found[name][0]


def name_interface() -> None:
    """Tell gloo and NCCL, which choose an interface by the host's name or by themselves; what is set already stays."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface())
    os.environ.setdefault(
        "NCCL_SOCKET_IFNAME", f"={interface()}"
    )  # "=": this one, not all whose names begin so


def name_ucx_devices() -> None:
    """Tell UCX, which would use every interface, to use ours and every port of every RDMA device; what is set already stays."""
    ports = sorted(f"{port.parents[1].name}:{port.name}" for port in RDMA_DEVICES.glob("*/ports/*"))
    os.environ.setdefault("UCX_NET_DEVICES", ",".join([interface(), *ports]))


def rdma_devices() -> list[str]:
    """Names of this machine's RDMA devices."""
    return sorted(each.name for each in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []


def without_proxy(hosts: Iterable[str]) -> None:
    """Have this process and what it starts speak to `hosts` directly, whatever proxy the site has."""
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    every = dict.fromkeys([*filter(None, known.split(",")), *hosts])
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(every)


def free_ports(count: int, host: str = LOOPBACK, seed: int | None = None) -> list[int]:
    """Distinct ports on `host` that nobody listens on now. Raises `RunFailed` where there are not so many."""
    found: list[int] = []
    with ExitStack() as held:  # all at once, so that none is found twice
        for port in random.Random(seed).sample(PORTS, k=len(PORTS)):
            if len(found) == count:
                break
            probe = held.enter_context(socket.socket())
            try:
                probe.bind((host, port))
            except OSError:
                probe.close()
                continue
            found.append(port)
    if len(found) < count:
        raise RunFailed(
            f"ports {PORTS.start} to {PORTS.stop - 1}: {len(found)} are free on {host}, {count} are needed; end what holds them"
        )
    return found
