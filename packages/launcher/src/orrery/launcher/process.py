"""One process of a stage: started in a session of its own, its output in its log, ended with everything that it started.

- A session of its own: Ctrl-C in the terminal reaches the launcher only, and the process group is the unit that is killed.
- Ending is SIGTERM to the process itself (an engine ends its own workers well), then SIGKILL to the whole group.
- What it starts bears its name and incarnation (`PROCESS`), by which whoever left the group is found when it is replaced.
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
from orrery.runtime.token import handed_over

PROCESS = "ORRERY_PROCESS"  # `inference.0.2`: process and incarnation


class Process:
    """A started `ProcessPlan`."""

    def __init__(self, plan: ProcessPlan, run_dir: Path, stage: str, attempt: int, port: int, cores: frozenset[int] | None,
                 env: Mapping[str, str], token: str, incarnation: int = 0):  # fmt: skip
        self.plan, self.port, self.cores, self.node = plan, port, cores, socket.gethostname()
        self.incarnation, self._of = incarnation, (run_dir, stage, attempt)
        self.name = f"{plan.role}.{plan.index}"
        self.env, self._token = {**env, PROCESS: f"{self.name}.{incarnation}"}, token
        self.log = run_dir / "logs" / f"{self.name}.log"
        argv = [
            *role_argv(sys.executable, plan.module, run_dir, stage, attempt, port, incarnation),
            "--index",
            str(plan.index),
        ]
        with open(self.log, "ab") as log, handed_over(token) as stdin:
            log.write(f"{header(stage, attempt, incarnation)} {shlex.join(argv)}\n".encode())
            log.flush()
            self._log_begin = log.tell()
            self._popen = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,
                close_fds=True,
            )
        self.pid = self._popen.pid
        if cores is not None:
            # From outside and at once: threads that it starts later inherit it. It may have ended already.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(self.pid, cores)

    def poll(self) -> int | None:
        """Exit status as `subprocess` has it (minus the signal's number when a signal ended it), None while it runs."""
        return self._popen.poll()

    @property
    def ending(self) -> str | None:
        """`exit code 1` or `SIGKILL`; None while it runs."""
        return signal_or_code(self.poll())

    def signal(self, number: int) -> None:
        if self.poll() is None:
            self._popen.send_signal(number)

    def wait(self, within_s: float) -> bool:
        """Whether it ended within so many seconds."""
        return ended_within(self._popen, within_s)

    def again(self) -> "Process":
        """The next incarnation, on another port."""
        [port] = free_ports(1)
        return Process(
            self.plan, *self._of, port, self.cores, self.env, self._token, self.incarnation + 1
        )

    def kill(self) -> None:
        """SIGKILL to the process and to everything that it left in its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    abandon = kill  # as a `Task` of Slurm's is, when all is over

    def last_words(self) -> str:
        """The last line that it wrote in this attempt, shortened; empty when it wrote nothing."""
        return last_line(self.log, self._log_begin)


def reap(group: int) -> bool:
    """Take in who has ended of a process group whose leader has; whether somebody of it is left. Only of children, adopted ones too."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def ended_within(popen: "subprocess.Popen[bytes]", within_s: float) -> bool:
    """A killed process too may stay: the kernel holds it while a device or a file system does not answer."""
    try:
        popen.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def role_argv(
    python: str,
    module: str,
    run_dir: Path,
    stage: str,
    attempt: int,
    port: int,
    incarnation: int = 0,
) -> list[str]:
    """The command of one role process, but for its index."""
    return [
        *(python, "-m", module, "--run-dir", str(run_dir), "--stage", stage),
        *("--attempt", str(attempt), "--port", str(port)),
        *(("--incarnation", str(incarnation)) if incarnation else ()),
    ]


def header(stage: str, attempt: int, incarnation: int = 0) -> str:
    """What a log has before every start."""
    again = f", restart {incarnation}" if incarnation else ""
    return f"=== {stage}, attempt {attempt}{again}, {time.strftime('%Y-%m-%d %H:%M:%S')}:"


def signal_or_code(code: int | None) -> str | None:
    """`SIGKILL` or `exit code 1`; None for None."""
    if code is None:
        return None
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def last_line(log: Path, begin: int) -> str:
    """The last line of a log after its first `begin` bytes, shortened; empty where there is none."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - 4096))
            lines = [
                line.strip()
                for line in file.read().decode(errors="replace").splitlines()
                if line.strip()
            ]
    except FileNotFoundError:
        return ""
    return lines[-1][:300] if lines else ""
