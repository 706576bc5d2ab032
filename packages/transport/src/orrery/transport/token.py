"""The run's token: the secret that the roles of one attempt share, so that nobody else's message is taken for theirs.

Always: a role that a launcher started has one, or ends. Only what a person or a test starts may go without, and then asks nobody for it.
"""

import os
from pathlib import Path

from orrery.manifest.errors import RunFailed
from orrery.observe.lifeline import LAUNCHER_PID, TOKEN


def was_launched() -> bool:
    """Whether a launcher started this process. Asks the kernel, since the lifeline takes the variable out of our environment."""
    return f"\0{LAUNCHER_PID}=".encode() in b"\0" + Path("/proc/self/environ").read_bytes()


def run_token() -> str:
    """`ORRERY_TOKEN`; empty where none is set. Raises RunFailed where a launcher started this process and none is set."""
    token = os.environ.get(TOKEN, "")
    if not token and was_launched():
        raise RunFailed(
            f"{TOKEN}: not set, though a launcher started this process; without it anybody could pass for a role of this run; "
            "see that whatever starts roles (Slurm, the container) hands variables on, then run again"
        )
    return token
