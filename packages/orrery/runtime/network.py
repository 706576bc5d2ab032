"""Find a role's address and ports, and authenticate callers with the run's secret token.

- Roles listen on the interface ORRERY_INTERFACE, by default loopback.
- Environment variables and arguments never contain the token. A process with the token hides its
  memory.
- ORRERY_TOKEN_FILE names the token's file, such as a Kubernetes secret. `-` is standard input.
- Each request carries a credential, derived from the token for one `Purpose`.
"""

import hmac
import os
import random
import select
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path

import psutil

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.runtime.process_control import WAS_LAUNCHED, hide_memory
from orrery.runtime.timing import scaled

INTERFACE = "ORRERY_INTERFACE"
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
RDMA_DEVICES = Path("/sys/class/infiniband")
PORT_TRIES = 1000
PORTS = range(20_000, 32_768)  # below the kernel's range for outgoing connections


def interface() -> str:
    return os.environ.get(INTERFACE) or LOOPBACK_INTERFACE


def address() -> str:
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
    # Without "=", NCCL takes the name for a prefix.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface()}")


def name_ucx_devices() -> None:
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
    raise _too_few_ports(host, f"no {count} consecutive free ports")


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
        raise _too_few_ports(host, f"{len(found)} free, but {count} are needed")
    return found


def _too_few_ports(host: str, found: str) -> RunFailed:
    return RunFailed(
        f"ports {PORTS.start} to {PORTS.stop - 1}: {host} has {found}; end programs that use them "
        "(`ss -ltnp`)"
    )


# Token

TOKEN_FILE = "ORRERY_TOKEN_FILE"
STANDARD_INPUT = "-"
MAX_BYTES = 256
TAKE_S = 60.0  # maximum wait for srun to pass on the token

_token = ""


@contextmanager
def handed_over(token: str) -> Iterator[int]:
    reader, writer = os.pipe()
    try:
        os.write(writer, f"{token}\n".encode())
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


def take_token() -> str:
    """Return this process's token, or "" without ORRERY_TOKEN_FILE. The first call reads it."""
    global _token
    place = os.environ.pop(TOKEN_FILE, "")
    if place:
        hide_memory()
        _token = _from_standard_input() if place == STANDARD_INPUT else _from_file(place)
    return _token


def _from_standard_input() -> str:
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < MAX_BYTES:
            if not select.select([0], [], [], scaled(TAKE_S))[0]:
                raise OrreryError(
                    f"{TOKEN_FILE}: no token arrived on standard input in {scaled(TAKE_S):g} s; "
                    "check that srun passes on standard input"
                )
            more = os.read(0, MAX_BYTES - len(line))
            if not more:
                break
            line += more
    finally:
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
    return line.decode(errors="replace").strip()


def _from_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace").strip()
    except OSError as error:
        raise OrreryError(
            f"{TOKEN_FILE}: {path} cannot be read ({error.strerror}); name a file that holds the "
            "run's token"
        ) from error


# Credentials


def run_token() -> str:
    """Return the token, or "" if no launcher started this process."""
    token = take_token()
    if not token and WAS_LAUNCHED:
        raise RunFailed(
            "the run's token: none came from the launcher on standard input, so any program could "
            "act as a role of this run; make Slurm or the container pass on standard input"
        )
    return token


class Purpose(StrEnum):
    GENERATE = "generate"  # permits /inference/v1/generate
    ADMINISTER = "administer"  # permits all other paths


def credential(token: str, purpose: Purpose) -> str:
    return hmac.new(token.encode(), f"orrery {purpose}".encode(), "sha256").hexdigest()


def authorization(token: str | None, purpose: Purpose) -> dict[str, str]:
    return {"Authorization": f"Bearer {credential(token, purpose)}"} if token else {}


def derived_key(purpose: str) -> bytes:
    """Return a 32-byte key for `purpose`, derived from the token."""
    return hmac.digest(run_token().encode(), purpose.encode(), "sha256")
