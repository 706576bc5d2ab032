"""Start roles as forks of a process that has imported their modules.

Imports take most of a role's start: 4 s of a processor for the trainer. One fork server for each
pytest imports them once, while no thread is in use. A fork has its own
session, environment, output and exit code, but shares the seed of hashes with other forks.
"""

import ctypes
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

from orrery.runtime.network import handed_over

CLONE_NEWNET = 0x40000000
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
        errors: Path | None = None,
        folder: Path = Path(),
    ):
        """Run in `folder` and in this thread's network. Write stdout and stderr to the end of
        `output` and, where given, `errors`. Hand over `token` on stdin.
        """
        self._polling = threading.Lock()
        streams = (output.resolve(), (errors or output).resolve())
        network = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
        places = (folder.resolve(), network)
        arguments = (module, list(words), streams, dict(environment), token, *places)
        self._process = _context.Process(target=be, args=arguments)
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


def be(
    module: str,
    words: list[str],
    streams: tuple[Path, Path],
    environment: dict[str, str],
    token: str,
    folder: Path,
    network: str,
) -> None:
    """Become the role, in a forked process."""
    if os.readlink(network) != os.readlink("/proc/self/ns/net"):
        with open(network) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "cannot enter the test's network")
    os.setsid()  # a role whose parent dies ends its whole process group
    os.chdir(folder)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    with handed_over(token) as stdin:
        os.dup2(stdin, 0)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name in [name for name, value in environment.items() if os.environ.get(name) != value]:
        os.environ[name] = environment[name]  # setproctitle finds argv by variables in their place
    multiprocessing.set_start_method("fork", force=True)
    resource_tracker._resource_tracker.__init__()  # each role has its own
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
