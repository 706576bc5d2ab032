"""Stop: ask the launcher that holds a run to end it."""

import os
import signal
import time
from pathlib import Path

from orrery.launcher import lock
from orrery.launcher import status as statuses
from orrery.manifest.errors import OrreryError

WITHIN_S = 30.0


def stop_run(run_dir: Path, within_s: float = WITHIN_S) -> str:
    """SIGTERM to the lock's holder, and wait for it to leave; the run's last message. Raises `OrreryError` when nobody runs it."""
    pid = lock.holder(run_dir)
    if pid is None:
        raise OrreryError(f"{run_dir.name}: no launcher runs it; type `orrery status {run_dir.name}` to see where it stands")
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise OrreryError(f"{run_dir.name}: its launcher (pid {pid}) is another user's; ask them, or become them") from None
    limit_s = time.monotonic() + within_s
    while lock.holder(run_dir) == pid:
        if time.monotonic() > limit_s:
            raise OrreryError(
                f"{run_dir.name}: the launcher (pid {pid}) did not end within {within_s:.0f} s; see {run_dir}/logs/launcher.0.log"
            )
        time.sleep(0.05)
    status = statuses.read(run_dir)
    return status.message if status else f"{run_dir.name}: stopped"
