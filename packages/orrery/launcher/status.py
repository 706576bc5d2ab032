"""`status.json`, `DONE` and checkpoints: the state of a run in its folder.

If `status.json` says `running` and no process holds the run's lock, the launcher died.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from orrery.launcher import lock
from orrery.launcher.slurm import queue
from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_as
from orrery.manifest.publish import write_atomic
from orrery.runtime.run_directory import STATUS, whole_checkpoints

State = Literal["running", "stopping", "done", "failed", "stopped"]


@dataclass
class RoleStatus:
    """`pid` is 0 in a step of a Slurm job. `exit` is None while the process runs."""

    name: str
    node: str
    pid: int
    port: int
    cores: list[int] | None
    state: Literal["running", "ended"]
    exit: str | None = None
    restarts: int = 0


@dataclass
class Status:
    """The newest attempt. `attempt` counts starts of any stage."""

    stage: str
    attempt: int
    state: State
    message: str
    launcher_pid: int
    host: str
    slurm_job: str | None
    started_s: float
    ended_s: float | None = None
    roles: list[RoleStatus] = field(default_factory=list)

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / STATUS, (json.dumps(asdict(self), indent=1) + "\n").encode())


def read(run_dir: Path) -> Status | None:
    path = run_dir / STATUS
    if not os.path.lexists(path):
        return None
    return read_as(path, Status, "it is not a launcher's status; remove it and start the run again")


def launcher_died(run_dir: Path, status: Status) -> bool:
    if status.state not in ("running", "stopping"):
        return False
    if status.slurm_job is None or status.host == socket.gethostname():
        return lock.holder(run_dir) is None
    try:
        state = queue.slurm_states([status.slurm_job]).get(status.slurm_job)
        return state is None or queue.state_of(state, status.slurm_job) != "running"
    except OrreryError:
        return False  # no answer from Slurm does not mean a dead launcher


def newest_checkpoint(run_dir: Path, stage: str = "rl") -> int | None:
    if stage not in ("sft", "rl"):
        return None
    return max((one.step for one in whole_checkpoints(run_dir, stage)), default=None)
