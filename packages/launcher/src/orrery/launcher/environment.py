"""The environment of a role: the launcher's own, with what a run determines put in its place."""

import os
from collections.abc import Mapping

from orrery.observe.lifeline import LAUNCHER_PID

THREADS_AT_MOST = 4  # more threads than this only wait for one another at the model sizes that are run on CPUs


def environment(base: Mapping[str, str], token: str, cores: frozenset[int] | None, devices: tuple[int, ...] | None) -> dict[str, str]:
    """`cores` None: not pinned, one thread; `devices` None: a CPU run, accelerators are hidden."""
    threads = str(min(THREADS_AT_MOST, len(cores))) if cores else "1"
    visible = base.get("CUDA_VISIBLE_DEVICES", "").split(",") if base.get("CUDA_VISIBLE_DEVICES") else None
    no_proxy = ",".join(filter(None, [base.get("NO_PROXY") or base.get("no_proxy"), "127.0.0.1,localhost"]))
    return {
        **base,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": ",".join(visible[device] if visible else str(device) for device in devices or ()),
        "NO_PROXY": no_proxy,  # roles call one another on loopback, whatever proxy the site has
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "ORRERY_TOKEN": token,  # shared by the roles of this attempt, so that nobody else's message is taken for theirs
        LAUNCHER_PID: str(os.getpid()),
    }
