"""Start another project's server as a child process, and wait until it answers."""

import subprocess
import time
from collections.abc import Callable

from orrery.manifest.errors import RunFailed
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import scaled

START_DEADLINE_S = 60.0
POLL_S = 0.05


def await_start(
    ctx: RoleContext,
    process: "subprocess.Popen[bytes]",
    program: str,
    what: str,
    answers: Callable[[], bool],
) -> None:
    """Wait until `answers()` is true. Raise RunFailed if `program` ends, or at the deadline.

    `what` says in the error what the program did not do, as an infinitive.
    """
    deadline_s = scaled(START_DEADLINE_S)
    end = time.monotonic() + deadline_s
    with ctx.health.waiting(f"{program} to {what}", deadline_s=deadline_s):
        while True:
            if process.poll() is not None:
                raise RunFailed(
                    f"{ctx.role}: {program} did not start (exit code {process.returncode}). "
                    f"Read logs/{ctx.name}.log"
                )
            if answers():
                return
            if time.monotonic() > end:
                raise RunFailed(
                    f"{ctx.role}: {program} did not {what} within {deadline_s:g} s. "
                    f"Read logs/{ctx.name}.log"
                )
            time.sleep(POLL_S)
