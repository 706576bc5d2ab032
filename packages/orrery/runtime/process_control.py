"""Isolate processes, end orphans, preempt a stage, and kill engines.

- Orphans: `ParentWatch` kills a role's process group when the role's parent ends. Other programs
  start with `preexec_fn=die_with_parent`.
- Preemption: near the job's time limit, the launcher writes `stages/<stage>/wind_down`. The
  orchestrator then stops all trainer ranks at one step.
- Fence: for an unresponsive engine, the orchestrator writes
  `stages/<stage>/fenced/<name>.<attempt>.<restarts>`, and the launcher kills the engine.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orrery.manifest.publish import write_atomic
from orrery.runtime.run_directory import fence_dir, request_path

LAUNCHER_PID = "ORRERY_LAUNCHER_PID"  # the parent's pid, or 0 if unknown
START = "ORRERY_START"
# Read at import, because `ParentWatch` removes LAUNCHER_PID.
WAS_LAUNCHED = LAUNCHER_PID in os.environ or START in os.environ
POLL_S = 0.5
CALLBACKS_S = 3.0

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CAPABILITIES = 64
CAPABILITIES_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the thread that forked this process ends.

    exec keeps the setting. Forked children lose it.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide_memory() -> None:
    """Hide this process's memory, environment and open files from the user's other processes.

    Forked children keep the setting. exec resets it.
    """
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_privileges() -> None:
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(CAPABILITIES):  # no effect without root
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    if _libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def kill_own_group() -> None:
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class ParentWatch:
    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []
        self.is_launched = LAUNCHER_PID in os.environ
        # Remove the variable: child roles must watch this process, not the launcher.
        self._parent = int(os.environ.pop(LAUNCHER_PID, 0)) or os.getppid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="parent watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def on_orphaned(self, callback: Callable[[], object]) -> None:
        self._callbacks.append(callback)

    def _watch(self) -> None:
        while os.getppid() == self._parent:
            if self._stop.wait(POLL_S):
                return
        runner = threading.Thread(
            target=self._run_callbacks, name="parent watch callbacks", daemon=True
        )
        runner.start()
        runner.join(CALLBACKS_S)
        kill_own_group()

    def _run_callbacks(self) -> None:
        for callback in self._callbacks:
            try:
                callback()
            except Exception as error:
                print(f"parent watch: {callback!r} failed: {error!r}", file=sys.stderr, flush=True)


# Preemption and fences

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h
PREEMPTIBLE = ("rl",)


class Preempted(Exception):
    """The stage stopped after batch `step` (0: before any batch) and can resume."""

    def __init__(self, step: int):
        super().__init__(f"wound down at step {step}")
        self.step = step


def preemption_requested(run_dir: Path, stage: str) -> bool:
    if stage not in PREEMPTIBLE:
        return False
    file = request_path(run_dir, stage)
    try:
        return file.name in os.listdir(file.parent)  # NFS may answer `exists` from its cache
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Fenced:
    """A request to kill process `name`, such as `inference.1`."""

    name: str
    incarnation: int
    why: str


def fence(run_dir: Path, stage: str, attempt: int, name: str, incarnation: int, why: str) -> None:
    folder = fence_dir(run_dir, stage)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.{attempt}.{incarnation}", why.encode())


def fenced(run_dir: Path, stage: str, attempt: int) -> list[Fenced]:
    found = []
    folder = fence_dir(run_dir, stage)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name, _, numbers = path.name.rpartition(f".{attempt}.")
        if name and not path.name.startswith(".") and numbers.isdigit():
            found.append(Fenced(name, int(numbers), path.read_text()))
    return found


def forget_fence(run_dir: Path, stage: str, attempt: int, one: Fenced) -> None:
    (fence_dir(run_dir, stage) / f"{one.name}.{attempt}.{one.incarnation}").unlink(missing_ok=True)
