"""The environment of a role: what a run and a site determine."""

import os
from collections.abc import Mapping

from orrery.launcher.site import Site
from orrery.runtime.network import INTERFACE
from orrery.runtime.parent_watch import LAUNCHER_PID, START
from orrery.runtime.role_context import LOG_LEVEL, log_level
from orrery.runtime.timing import SCALE
from orrery.runtime.token import STANDARD_INPUT, TOKEN_FILE

THREADS_AT_MOST = (
    4  # more threads than this only wait for one another at the model sizes that are run on CPUs
)
LOOPBACK = "127.0.0.1,localhost"


def environment(
    base: Mapping[str, str],
    site: Site,
    start: str,
    cores: frozenset[int] | None,
    devices: tuple[str, ...] | None,
) -> dict[str, str]:
    """Of a process on this machine: the launcher's own with ours put in its place.

    `cores` None: not pinned, one thread; `devices` None: a CPU run, accelerators are hidden.
    """
    no_proxy = ",".join(filter(None, [base.get("NO_PROXY") or base.get("no_proxy"), LOOPBACK]))
    return {
        **base,
        **_common(site, start, len(cores) if cores else 1),
        "CUDA_VISIBLE_DEVICES": ",".join(devices or ()),
        "NO_PROXY": no_proxy,  # roles call one another on loopback, whatever proxy the site has
        "no_proxy": no_proxy,
        LAUNCHER_PID: str(os.getpid()),
    }


def cluster_environment(site: Site, start: str, cpus: int, num_nodes: int) -> dict[str, str]:
    """What a task of a Slurm step is told. Roles of one node stay on loopback, whatever interface the site names."""
    return {
        **_common(site, start, cpus),
        **({INTERFACE: site.network.interface} if site.network and num_nodes > 1 else {}),
        "NO_PROXY": "*",
        "no_proxy": "*",
        LAUNCHER_PID: "0",  # launched, and the parent is whoever Slurm has made it
    }


def _common(site: Site, start: str, cpus: int) -> dict[str, str]:
    threads = str(min(THREADS_AT_MOST, cpus))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # a library that goes through sets makes the same problems in every process and attempt
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        START: start,
        TOKEN_FILE: STANDARD_INPUT,  # the token's source
        **({LOG_LEVEL: level} if (level := log_level()) else {}),
        SCALE: str(site.roles.deadline_scale),
        **site.environment,
    }
