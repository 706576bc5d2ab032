"""Start roles as forks of a process that has imported their modules.

Imports take most of a role's start: 4 s of a processor for the trainer. One fork server for each
pytest imports them once, while no thread is in use. A fork is a process of its own, with its own
session, environment, output and exit code, but shares the seed of hashes with other forks.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import patch

from orrery.runtime.token import handed_over

_context = multiprocessing.get_context("forkserver")


def import_before(*modules: str, **environment: str) -> None:
    """Start this pytest's fork server, if it does not run yet, and let it import `modules`.

    `environment` has variables that they read at import.
    """
    multiprocessing.set_forkserver_preload(["pytest", *modules])
    path = os.pathsep.join(filter(None, sys.path))
    with patch.dict(os.environ, environment, OMP_NUM_THREADS="1", PYTHONPATH=path):
        forkserver.ensure_running()


class ForkedRole:
    """`python -m MODULE WORDS` as a fork, with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        output: Path,
        environment: Mapping[str, str],
        token: str = "",
    ):
        """Write stdout and stderr to the end of `output`. Hand over `token` on stdin."""
        self._polling = threading.Lock()
        arguments = (module, [*map(str, words)], str(output), dict(environment), token)
        self._process = _context.Process(target=_be, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._polling:  # the exit code can be read once
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        if not wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _be(
    module: str, words: list[str], output: str, environment: dict[str, str], token: str
) -> None:
    os.setsid()  # a role whose parent dies ends its whole process group
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with handed_over(token) as stdin:
        os.dup2(stdin, 0)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)
    resource_tracker._resource_tracker.__init__()  # a role has one of its own
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
