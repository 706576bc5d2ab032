"""The sockets that a run's processes listen on: process, address and credential.

- `LISTENERS` is complete. A test compares it with `docs/security.md`.
- torch, gloo, NCCL and NIXL open a socket per process group (`most` None).
"""

import contextlib
import ipaddress
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from orrery.runtime.network import LOOPBACK

ACCEPTS = 0x10000  # __SO_ACCEPTCON of /proc/net/unix
LISTEN, UNCONNECTED = "0A", "07"
NONE = "none"
ROLE, ON_LOOPBACK, UNIX = "role", "loopback", "unix"


@dataclass(frozen=True)
class Listener:
    """A socket of `role`, or of its child with `program` in its name.

    `scope` "role" is loopback on one node, otherwise the run's interface.
    """

    role: str
    program: str
    what: str
    scope: str
    credential: str
    stranger: str  # the answer for a process without credentials
    most: int | None = 1  # sockets per process, None: no bound
    is_ours: bool = True  # whether this project checks the credential

    def matches(self, program: str) -> bool:
        return self.program in program if self.program else not program


BY_PATH = "`generate` or `administer`, by path"
ENDS = "can end the run, or join a group while it forms; no secret passes"
ENDS_UPDATE = "can end an update; weights that it forges fail their fingerprints"
FORGES = "can end the engine, or forge requests and answers"
MODE_0700 = "folder of mode 0700"
LISTENERS = (
    Listener("orchestrator", "", "rollout wire: asks and heads", ROLE,
             "CurveZMQ keys derived from the token", "nothing"),
    Listener("orchestrator", "", "rollout wire: bytes", ROLE, "ticket, issued over the wire",
             "nothing"),
    Listener("router", "", "front", ROLE, BY_PATH, "401"),
    Listener("router", "vllm::router", "vllm-router", ON_LOOPBACK, "`generate`",
             "401; 405, 415 or 422 if malformed"),
    Listener("router", "vllm::router", "metrics of vllm-router", ON_LOOPBACK, NONE,
             "reads counts and engines' addresses", 1, False),
    Listener("inference", "", "engine", ROLE, BY_PATH, "401, but reads `/health` and `/metrics`"),
    Listener("inference", "", "vLLM: API server", UNIX, MODE_0700, "cannot reach it", None),
    Listener("inference", "VLLM::", "vLLM: engine cores", UNIX, MODE_0700, "cannot reach it", None),
    Listener("inference", "VLLM::", "ranks of an engine: TCPStore, gloo, NCCL", ROLE, NONE, ENDS,
             None, False),
    Listener("inference", "", "vLLM: server of ranks on other nodes", ROLE, NONE, FORGES, None,
             False),
    Listener("inference", "VLLM::", "vLLM: coordinator of ranks", ROLE, NONE, FORGES, None, False),
    Listener("headless", "VLLM::", "ranks of an engine: TCPStore, gloo, NCCL", ROLE, NONE, ENDS,
             None, False),
    Listener("headless", "VLLM::", "weight wire: gloo, NCCL, NIXL", ROLE, NONE, ENDS_UPDATE, None,
             False),
    Listener("inference", "VLLM::", "weight wire: gloo, NCCL, NIXL", ROLE, NONE, ENDS_UPDATE, None,
             False),
    Listener("inference", "VLLM::", "caches: NIXL, Mooncake", ROLE, NONE,
             "can read and change caches of requests", None, False),
    Listener("serve", "", "server of `orrery serve`", ROLE, "the token that it prints",
             "401, but reads `/health` and `/metrics`"),
    Listener("serve", "", "vLLM: API server", UNIX, MODE_0700, "cannot reach it", None),
    Listener("serve", "VLLM::", "vLLM: engine core", UNIX, MODE_0700, "cannot reach it", None),
    Listener("serve", "VLLM::", "the engine's own gloo, NCCL", ROLE, NONE, "can end the server",
             None, False),
    Listener("trainer", "", "ranks of the trainer: TCPStore, gloo, NCCL", ROLE, NONE, ENDS, None,
             False),
    Listener("trainer", "", "weight wire: TCPStore", ROLE, "values carry an HMAC",
             "can end the run; cannot forge a value", 1, False),
    Listener("trainer", "", "weight wire: gloo, NCCL, NIXL", ROLE, NONE, ENDS_UPDATE, None, False),
    Listener("kv_store", "mooncake_master", "Mooncake Store's master", ROLE, NONE,
             "can drop cached blocks and end the run", 2, False),
)  # fmt: skip


@dataclass(frozen=True)
class Socket:
    """A listening socket: an IP address and port, or a path and port 0."""

    role: str
    program: str  # "" for the role's own process
    pid: int
    address: str
    port: int

    def __str__(self) -> str:
        where = f"{self.address}:{self.port}" if self.port else self.address
        return f"{self.program or self.role} (pid {self.pid}) of {self.role} listens on {where}"

    def rows(self, host: str) -> list[Listener]:
        scopes = {UNIX} if not self.port else {ROLE} if self.address == host else set()
        scopes |= {ON_LOOPBACK} if self.port and self.address == LOOPBACK else set()
        rows = (row for row in LISTENERS if row.role == self.role and row.scope in scopes)
        return [row for row in rows if row.matches(self.program)]


def listening(roles: Mapping[int, str]) -> list[Socket]:
    """Return the sockets of these processes (pid → role) and their descendants."""
    found = []
    for pid, role in roles.items():
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            if each.pid in roles and each.pid != pid:
                continue
            program = "" if each.pid == pid else each.name()
            found += [Socket(role, program, each.pid, *one) for one in sorted(_addresses(each.pid))]
    return found


def _addresses(pid: int) -> set[tuple[str, int]]:
    tables = Path(f"/proc/{pid}/net")
    accepting: dict[str, tuple[str, int]] = {}
    for name in ("tcp", "tcp6", "udp", "udp6"):
        state = LISTEN if name.startswith("tcp") else UNCONNECTED
        for words in _rows(tables / name):
            if words[3] == state:
                address, _, port = words[1].partition(":")
                accepting[words[9]] = (_address(address), int(port, 16))
    for words in _rows(tables / "unix"):
        if int(words[3], 16) & ACCEPTS:
            accepting[words[6]] = (words[7] if len(words) > 7 else "", 0)
    return {accepting[inode] for inode in _sockets(pid) if inode in accepting}


def _rows(table: Path) -> list[list[str]]:
    return [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []


def _sockets(pid: int) -> Iterable[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                yield target[8:-1]


def _address(words: str) -> str:
    parts = [int(words[start : start + 8], 16) for start in range(0, len(words), 8)]
    data = b"".join(part.to_bytes(4, sys.byteorder) for part in parts)
    return str(ipaddress.ip_address(data))


def undeclared(found: Iterable[Socket], host: str) -> list[str]:
    sentences, counted = [], dict[tuple[int, str], list[Socket]]()
    for one in found:
        rows = one.rows(host)
        if not rows or (one.address.startswith("@") or not one.address):
            sentences.append(f"{one}, which is in no row of LISTENERS")
        else:
            counted.setdefault((one.pid, "unix" if not one.port else one.address), []).append(one)
    for same in counted.values():
        rows = same[0].rows(host)
        most = None if any(row.most is None for row in rows) else sum(row.most or 0 for row in rows)
        if most is not None and len(same) > most:
            others = f"{len(same) - 1} more such sockets"
            sentences.append(f"{same[0]} and on {others}, but LISTENERS has {most}")
    return sentences


def table() -> str:
    where = {ROLE: "the role's host", ON_LOOPBACK: "loopback", UNIX: "Unix socket"}
    lines = [
        "| role | what listens | where | credential | a stranger there |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.role} | {row.what} | {where[row.scope]} | {row.credential} | {row.stranger} |"
        for row in LISTENERS
    ]
    return "\n".join(lines)
