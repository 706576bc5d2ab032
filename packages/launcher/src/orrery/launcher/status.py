"""`status.json`: what the launcher last knew of a run, replaced atomically; and what it means now that one reads it.

A status that says `running` while nobody holds the run's lock is a launcher that died: nothing it says of its processes holds any more.
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

State = Literal["running", "stopping", "done", "failed", "stopped"]


@dataclass
class RoleStatus:
    """One process: `exit` is None while it runs, else how it ended ("exit code 1", "SIGKILL"). `pid` 0: a step of a Slurm job.

    `restarts`: how often it was started again within the attempt.
    """

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
    """The newest attempt of the newest stage; `attempt` counts every start of any stage of this run."""

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
        write_atomic(run_dir / "status.json", (json.dumps(asdict(self), indent=1) + "\n").encode())


def read(run_dir: Path) -> Status | None:
    """None where no launcher has run yet; raises `OrreryError` where the file is not one that a launcher wrote."""
    path = run_dir / "status.json"
    if not os.path.lexists(path):
        return None
    return read_as(path, Status, "it is not a launcher's status; remove it and start the run again")


def launcher_died(run_dir: Path, status: Status) -> bool:
    """Whether nobody works on a run that says somebody does. A launcher that Slurm runs on another host is asked for at Slurm."""
    if status.state not in ("running", "stopping"):
        return False
    if status.slurm_job is None or status.host == socket.gethostname():
        return lock.holder(run_dir) is None
    try:
        word = queue.slurm_states([status.slurm_job]).get(status.slurm_job)
        return word is None or queue.state_of(word, status.slurm_job) != "running"
    except OrreryError:
        return False  # no Slurm to ask from here; its silence is not the launcher's death
