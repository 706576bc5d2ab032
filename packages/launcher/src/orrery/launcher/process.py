"""One process of a stage: started in a session of its own, its output in its log, ended with everything that it started.

- A session of its own: Ctrl-C in the terminal reaches the launcher only, and the process group is the unit that is killed.
- Ending is SIGTERM to the process itself (an engine ends its own workers well), then SIGKILL to the whole group.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from orrery.manifest.plan import ProcessPlan


class Process:
    """A started `ProcessPlan`."""

    def __init__(self, plan: ProcessPlan, run_dir: Path, stage: str, attempt: int, port: int, cores: frozenset[int] | None,
                 env: Mapping[str, str]):  # fmt: skip
        self.plan, self.port, self.cores = plan, port, cores
        self.name = f"{plan.role}.{plan.index}"
        self.log = run_dir / "logs" / f"{self.name}.log"
        argv = [sys.executable, "-m", plan.module, "--run-dir", str(run_dir), "--stage", stage, "--index", str(plan.index)]
        argv += ["--attempt", str(attempt), "--port", str(port)]
        with open(self.log, "ab") as log:
            log.write(f"=== {stage}, attempt {attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {shlex.join(argv)}\n".encode())
            log.flush()
            self._log_begin = log.tell()
            self._popen = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(env), start_new_session=True, close_fds=True
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
        code = self.poll()
        if code is None:
            return None
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def signal(self, number: int) -> None:
        if self.poll() is None:
            self._popen.send_signal(number)

    def wait(self) -> None:
        self._popen.wait()

    def kill_group(self) -> None:
        """SIGKILL to the process and to everything that it left in its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The last line that it wrote in this attempt, shortened; empty when it wrote nothing."""
        with open(self.log, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begin, size - 4096))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""
