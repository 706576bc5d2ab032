"""End a process soon after its parent.

A role polls its parent (`ParentWatch`), and kills its own process group if the parent ends.
Third-party programs need `preexec_fn=die_with_parent`.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

LAUNCHER_PID = "ORRERY_LAUNCHER_PID"  # parent's pid, 0 if unknown
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
    """Drop all Linux capabilities permanently, even as root."""
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(CAPABILITIES):  # no effect unless root
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
        # Remove the variable: children must watch this process, not the launcher.
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
