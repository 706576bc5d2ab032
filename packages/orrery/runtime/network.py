"""Find free ports and a role's address. Roles never listen on all interfaces.

ORRERY_INTERFACE names the network interface. The default is loopback.
"""

import os
import random
import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from orrery.manifest.errors import OrreryError, RunFailed

INTERFACE = "ORRERY_INTERFACE"
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
RDMA_DEVICES = Path("/sys/class/infiniband")
PORT_TRIES = 1000
PORTS = range(20_000, 32_768)  # below the kernel's range for outgoing connections


def interface() -> str:
    return os.environ.get(INTERFACE) or LOOPBACK_INTERFACE


def address() -> str:
    """Return the IPv4 address of `interface()`. Raise OrreryError if it has none."""
    name = interface()
    if name == LOOPBACK_INTERFACE:
        return LOOPBACK
    found = {
        each: [one.address for one in addresses if one.family == socket.AF_INET]
        for each, addresses in psutil.net_if_addrs().items()
    }
    if not found.get(name):
        some = {
            each: ", ".join(addresses) for each, addresses in sorted(found.items()) if addresses
        }
        usable = ", ".join(f"{each} ({addresses})" for each, addresses in some.items())
        raise OrreryError(
            f"{INTERFACE}: {name} has no IPv4 address on "
            f"{socket.gethostname()}, which has {usable or 'none'}; set [network] interface in the "
            "site file to an interface of every node"
        )
    return found[name][0]


def name_interface() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface())
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface()}")  # "=" demands equality


def name_ucx_devices() -> None:
    """Set UCX_NET_DEVICES, unless set, to `interface()` and all RDMA ports."""
    ports = sorted(f"{port.parents[1].name}:{port.name}" for port in RDMA_DEVICES.glob("*/ports/*"))
    os.environ.setdefault("UCX_NET_DEVICES", ",".join([interface(), *ports]))


def rdma_devices() -> list[str]:
    return sorted(each.name for each in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []


def without_proxy(hosts: Iterable[str]) -> None:
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    every = dict.fromkeys([*filter(None, known.split(",")), *hosts])
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(every)


def adjoining_ports(count: int, host: str) -> int:
    for _ in range(PORT_TRIES):
        first = random.randrange(PORTS.start, PORTS.stop - count + 1)
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind((host, port))
            return first
    raise RunFailed(
        f"ports {PORTS.start} to {PORTS.stop - 1}: {host} has no {count} free ones in a row; end "
        "programs that use them (`ss -ltnp`)"
    )


def free_ports(count: int, host: str = LOOPBACK, seed: int | None = None) -> list[int]:
    found: list[int] = []
    with ExitStack() as held:
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
            f"ports {PORTS.start} to {PORTS.stop - 1}: {host} has {len(found)} free, but {count} "
            "are needed; end programs that use them (`ss -ltnp`)"
        )
    return found
