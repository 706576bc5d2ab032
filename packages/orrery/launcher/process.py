"""A local process of a stage.

- Its session shields it from Ctrl-C, and makes it a group to kill.
- SIGTERM goes to the process alone, because an engine ends its own workers well.
- Processes that leave the group inherit its name and incarnation (`PROCESS`).
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from orrery.manifest.plan import ProcessPlan
from orrery.runtime.network import free_ports
from orrery.runtime.run_directory import log_path
from orrery.runtime.token import handed_over

PROCESS = "ORRERY_PROCESS"  # `inference.0.2`: process and incarnation


class Process:
    """A started `ProcessPlan` with the output `logs/<role>.<index>.log`."""

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
            # At once, since threads inherit it. The process may have ended.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(self.pid, cores)

    def poll(self) -> int | None:
        """Return the exit code, minus the signal's number after a signal, None if running."""
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

    abandon = kill  # a `SlurmTask` has another way

    def last_output(self) -> str:
        return last_line(self.log, self._log_begin)


def reap(group: int) -> bool:
    """Reap ended members of a process group. Return whether members are left."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def ended_within(popen: "subprocess.Popen[bytes]", within_s: float) -> bool:
    """Return whether the process ended. Even SIGKILL may hang in the kernel."""
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
    """Return the log's shortened last line after `begin` bytes, or ""."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - 4096))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
