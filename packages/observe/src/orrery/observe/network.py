"""Network: where a role listens, and which address of it others are told.

- In: `ORRERY_INTERFACE`, the name of a network interface; without it everything is on loopback, for the roles of one machine.
- Out: that interface's IPv4 address, for sockets and published addresses, and its name, for libraries that want names.
- Never: all interfaces at once. A role listens where the run's other roles come from, and nowhere else.
"""

import os
import socket
from collections.abc import Iterable

import psutil

from orrery.manifest.errors import OrreryError

INTERFACE = "ORRERY_INTERFACE"
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"


def interface() -> str:
    """The interface that this process is to use."""
    return os.environ.get(INTERFACE) or LOOPBACK_INTERFACE


def address() -> str:
    """The IPv4 address of `interface()`. Raises `OrreryError` where there is no such interface, or it has none."""
    name = interface()
    if name == LOOPBACK_INTERFACE:
        return LOOPBACK
    found = {each: [one.address for one in addresses if one.family == socket.AF_INET] for each, addresses in psutil.net_if_addrs().items()}
    if not found.get(name):
        usable = ", ".join(f"{each} ({', '.join(addresses)})" for each, addresses in sorted(found.items()) if addresses)
        raise OrreryError(
            f"{INTERFACE}: {name} is not an interface with an IPv4 address on {socket.gethostname()}; "
            f"it has {usable or 'none'}; set [network] interface in the site file to one that every node has"
        )
    return found[name][0]


def name_interface() -> None:
    """Tell gloo and NCCL, which choose an interface by the host's name or by themselves; what is set already stays."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface())
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface()}")  # "=": this one, not all whose names begin so


def without_proxy(hosts: Iterable[str]) -> None:
    """Have this process and what it starts speak to `hosts` directly, whatever proxy the site has."""
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    every = dict.fromkeys([*filter(None, known.split(",")), *hosts])
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(every)
