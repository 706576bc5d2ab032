"""Lifeline: no process of a run outlives the process that started it.

- A role watches its parent (`Lifeline`): when the parent is gone it runs its callbacks (remove shared memory, kill an engine),
  then kills its whole process group with itself in it. Nothing of the parent's doing is needed, so `kill -9` of a launcher works too.
- A command that is not ours (a router binary) cannot watch; start it with `preexec_fn=die_with_parent`, and the kernel kills it.
- Polling, not a pipe: a pipe's end is inherited by every child that a role forgets to close it for.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

LAUNCHER_PID = "ORRERY_LAUNCHER_PID"  # tells a role which parent it should have, so that a parent lost before our first look is noticed
START = "ORRERY_START"  # in the environment of all processes of an attempt and their children; no secret
WAS_LAUNCHED = (
    LAUNCHER_PID in os.environ or START in os.environ
)  # at import: `Lifeline` removes one
POLL_S = 0.5
CALLBACKS_S = 3.0

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CAPABILITIES = 64  # the kernel's upper bound
CAPABILITIES_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """For `preexec_fn`: SIGKILL to this process when the thread that forked it ends. Linux; survives exec, not fork."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """From now on descendants whose parent dies become children of this process, so that it can find and end them."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory, environment and open files.

    Forks inherit this; exec ends it.
    """
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_privileges() -> None:
    """Drop all capabilities for good, also after exec. Root then has an ordinary user's rights."""
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(CAPABILITIES):  # refused without privileges
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    if _libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def kill_own_group() -> None:
    """End this process and, where it leads a process group (a role does), everything it started in that group."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Lifeline:
    """A daemon thread that ends this process soon after its parent died."""

    def __init__(self, poll_s: float = POLL_S):
        self._callbacks: list[Callable[[], object]] = []
        self._poll_s = poll_s
        self.is_launched = LAUNCHER_PID in os.environ  # else a person or a test started it
        self._parent = (
            int(os.environ.pop(LAUNCHER_PID, 0)) or os.getppid()
        )  # popped: what we start has us as its parent
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def on_orphaned(self, callback: Callable[[], object]) -> None:
        """Run `callback` (from the lifeline's thread) before the end; it gets a few seconds, and its errors are only logged."""
        self._callbacks.append(callback)

    def _watch(self) -> None:
        while os.getppid() == self._parent:
            if self._stop.wait(self._poll_s):
                return
        runner = threading.Thread(
            target=self._run_callbacks, name="lifeline-callbacks", daemon=True
        )
        runner.start()
        runner.join(CALLBACKS_S)
        kill_own_group()

    def _run_callbacks(self) -> None:
        for callback in self._callbacks:
            try:
                callback()
            except Exception as error:  # the boundary: one broken callback must not keep the others, or the end, from happening
                print(f"lifeline: {callback!r} failed: {error!r}", file=sys.stderr, flush=True)
