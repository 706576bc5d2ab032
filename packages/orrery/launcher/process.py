"""Start a local process, with its CPU cores, devices and environment.

- The process leads a new session, so Ctrl-C does not reach it.
- SIGTERM goes only to the process itself, because an engine ends its workers in order.
- Trainers and engines are pinned to adjacent cores. In a stage with both, each kind gets half of
  the cores.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from orrery.launcher.site import Site
from orrery.manifest.errors import OrreryError
from orrery.manifest.machine import missing_gpu
from orrery.manifest.plan import ENGINE_ROLES, ProcessPlan
from orrery.runtime.network import INTERFACE, STANDARD_INPUT, TOKEN_FILE, free_ports, handed_over
from orrery.runtime.process_control import LAUNCHER_PID, START
from orrery.runtime.role_context import LOG_LEVEL, log_level
from orrery.runtime.run_directory import CHECKPOINT_TARGET, log_path
from orrery.runtime.timing import SCALE

PROCESS = "ORRERY_PROCESS"  # holds the process's name and restart number: `inference.0.2`
KINDS = ("trainer", *ENGINE_ROLES)
MAX_THREADS = 4  # more threads do not speed up CPU models
LOOPBACK = "127.0.0.1,localhost"


def require(word: str, *packages: str) -> None:
    if lacks := [name for name in packages if find_spec(name) is None]:
        raise OrreryError(
            f"{word}: this Python lacks {', '.join(lacks)}. Type `make setup`, or run this command "
            "with a Python that has them"
        )


class Process:
    def __init__(
        self, plan: ProcessPlan, run_dir: Path, stage: str, attempt: int, port: int,
        cores: frozenset[int] | None, env: Mapping[str, str], token: str, incarnation: int = 0,
    ):  # fmt: skip
        self.plan, self.port, self.cores, self.node = plan, port, cores, socket.gethostname()
        self.incarnation, self._of = incarnation, (run_dir, stage, attempt)
        self.name = f"{plan.role}.{plan.index}"
        self.env, self._token = {**env, PROCESS: f"{self.name}.{incarnation}"}, token
        self.log = log_path(run_dir, self.name)
        argv = role_argv(sys.executable, plan.module, run_dir, stage, attempt, port, incarnation)
        argv += ["--index", str(plan.index)]
        with open(self.log, "ab") as log, handed_over(token) as stdin:
            log.write(f"{header(stage, attempt, incarnation)} {shlex.join(argv)}\n".encode())
            log.flush()
            self._log_begin = log.tell()
            self._popen = subprocess.Popen(
                argv, stdin=stdin, stdout=log, stderr=log, env=self.env,
                start_new_session=True, close_fds=True,
            )  # fmt: skip
        self.pid = self._popen.pid
        if cores is not None:
            # Pin early, because threads inherit the pinning.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(self.pid, cores)

    def poll(self) -> int | None:
        """Return the exit code, -N after fatal signal N, or None while the process runs."""
        return self._popen.poll()

    @property
    def ending(self) -> str | None:
        return signal_or_code(self.poll())

    def signal(self, number: int) -> None:
        if self.poll() is None:
            self._popen.send_signal(number)

    def wait(self, within_s: float) -> bool:
        return ended_within(self._popen, within_s)

    def restart(self) -> "Process":
        [port] = free_ports(1)
        incarnation = self.incarnation + 1
        return Process(self.plan, *self._of, port, self.cores, self.env, self._token, incarnation)

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    abandon = kill

    def last_output(self) -> str:
        return last_line(self.log, self._log_begin)


def reap(group: int) -> bool:
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def ended_within(popen: "subprocess.Popen[bytes]", within_s: float) -> bool:
    try:
        popen.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def role_argv(
    python: str, module: str, run_dir: Path, stage: str, attempt: int, port: int,
    incarnation: int = 0,
) -> list[str]:  # fmt: skip
    argv = [python, "-m", module, "--run-dir", str(run_dir), "--stage", stage]
    argv += ["--attempt", str(attempt), "--port", str(port)]
    return argv + (["--incarnation", str(incarnation)] if incarnation else [])


def header(stage: str, attempt: int, incarnation: int = 0) -> str:
    again = f", restart {incarnation}" if incarnation else ""
    return f"=== {stage}, attempt {attempt}{again}, {time.strftime('%Y-%m-%d %H:%M:%S')}:"


def signal_or_code(code: int | None) -> str | None:
    if code is None:
        return None
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def last_line(log: Path, begin: int) -> str:
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - 4096))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def share_cores(
    cores: Sequence[int], processes: Sequence[ProcessPlan]
) -> dict[tuple[str, int], frozenset[int]]:
    cores = sorted(cores)
    pinned = [process for process in processes if process.role in KINDS]
    kinds = list({process.role in ENGINE_ROLES: None for process in pinned})
    if len(kinds) == 2 and len(cores) > 1:
        half = (len(cores) + 1) // 2
        pools = {False: cores[:half], True: cores[half:]}
    else:
        has_orchestrator = any(process.role == "orchestrator" for process in processes)
        spare = len(kinds) == 1 and len(cores) > len(pinned) and has_orchestrator
        pools = dict.fromkeys(kinds, cores[:-1] if spare else cores)
    shares: dict[tuple[str, int], frozenset[int]] = {}
    for kind in kinds:
        members = [process for process in pinned if (process.role in ENGINE_ROLES) is kind]
        for position, process in enumerate(members):
            share = _share(pools[kind], position, len(members))
            shares[process.role, process.index] = frozenset(share)
    return shares


def _share(pool: Sequence[int], position: int, num_members: int) -> Sequence[int]:
    if len(pool) < num_members:
        return [pool[position * len(pool) // num_members]]
    each = len(pool) // num_members
    return pool[position * each : (position + 1) * each]


def installed_hardware() -> str | None:
    """Return the HARDWARE ("cpu" or "cuda") that `make setup` got, or None if unknown."""
    marker = Path(sys.prefix) / "hardware"
    return marker.read_text().strip() if marker.is_file() else None


def check_packages(name: str, needs_gpus: bool) -> None:
    """Raise OrreryError if .venv's packages or this machine do not suit the run's hardware.

    If `make setup` did not install the packages, check nothing.
    """
    needed, found = "cuda" if needs_gpus else "cpu", installed_hardware()
    rendered = f"`orrery render {name} --on-this-machine`, and start the run that it names"
    reason = missing_gpu() if found == "cuda" else None
    if found is None or (found == needed and reason is None):
        return
    if reason is not None:
        raise OrreryError(
            f"the run is for hardware {needed}, .venv has the packages of cuda, and {reason}. Type "
            "`orrery doctor` to check the driver. To run without a GPU, type `make setup "
            f"HARDWARE=cpu`, then {rendered}"
        )
    raise OrreryError(
        f"the run is for hardware {needed}, and .venv has the packages of {found}. If this machine "
        f"has such hardware, type `make setup HARDWARE={needed}`. If not, type {rendered}"
    )


def share_devices(
    offered: Sequence[str], processes: Sequence[ProcessPlan]
) -> dict[tuple[str, int], tuple[str, ...]]:
    """Return devices by (role, index). Raise ValueError if devices are too few or repeated."""
    shares: dict[tuple[str, int], tuple[str, ...]] = {}
    needed = max(process.first_device + process.num_devices for process in processes)
    for process in processes:
        first = process.first_device
        share = tuple(offered[first : first + process.num_devices])
        if len(set(share)) < len(share):
            raise ValueError(
                f"{process.role}.{process.index} would get the devices {','.join(share)} "
                f"of {','.join(offered)}, but a device is named twice"
            )
        shares[process.role, process.index] = share
    if needed > len(offered):
        raise ValueError(
            f"the stage needs {needed} devices, but this machine offers {len(offered)}"
        )
    return shares


def environment(
    base: Mapping[str, str],
    site: Site,
    start: str,
    cores: frozenset[int] | None,
    devices: tuple[str, ...] | None,
) -> dict[str, str]:
    no_proxy = ",".join(filter(None, [base.get("NO_PROXY") or base.get("no_proxy"), LOOPBACK]))
    return {
        **base,
        **_common(site, start, len(cores) if cores else 1),
        "CUDA_VISIBLE_DEVICES": ",".join(devices or ()),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        LAUNCHER_PID: str(os.getpid()),
    }


def cluster_environment(site: Site, start: str, cpus: int, num_nodes: int) -> dict[str, str]:
    return {
        **_common(site, start, cpus),
        **({INTERFACE: site.network.interface} if site.network and num_nodes > 1 else {}),
        "NO_PROXY": "*",
        "no_proxy": "*",
        LAUNCHER_PID: "0",  # unknown, because srun starts the role
    }


def _common(site: Site, start: str, cpus: int) -> dict[str, str]:
    threads = str(min(MAX_THREADS, cpus))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        START: start,
        TOKEN_FILE: STANDARD_INPUT,
        **({LOG_LEVEL: level} if (level := log_level()) else {}),
        SCALE: str(site.roles.deadline_scale),
        CHECKPOINT_TARGET: site.roles.checkpoint_target,
        **site.environment,
    }
