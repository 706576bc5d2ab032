"""The cores, devices and environment of each process of a stage.

- Trainers and engines are pinned. Each kind gets half of the cores, so that neither stalls the
  other, and each process an equal run of neighbouring cores.
- If one kind computes beside an orchestrator, a left-over core stays free for it.
"""

import os
from collections.abc import Mapping, Sequence

from orrery.launcher.site import Site
from orrery.manifest.plan import ProcessPlan
from orrery.runtime.network import INTERFACE
from orrery.runtime.parent_watch import LAUNCHER_PID, START
from orrery.runtime.role_context import LOG_LEVEL, log_level
from orrery.runtime.timing import SCALE
from orrery.runtime.token import STANDARD_INPUT, TOKEN_FILE

KINDS = ("trainer", "inference")
MAX_THREADS = 4  # for models on CPUs, more threads only wait for one another
LOOPBACK = "127.0.0.1,localhost"


def share_cores(
    cores: Sequence[int], processes: Sequence[ProcessPlan]
) -> dict[tuple[str, int], frozenset[int]]:
    cores = sorted(cores)
    pinned = [process for process in processes if process.role in KINDS]
    kinds = [kind for kind in KINDS if any(process.role == kind for process in pinned)]
    if len(kinds) == 2 and len(cores) > 1:
        half = (len(cores) + 1) // 2
        pools = {"trainer": cores[:half], "inference": cores[half:]}
    else:
        has_orchestrator = any(process.role == "orchestrator" for process in processes)
        spare = len(kinds) == 1 and len(cores) > len(pinned) and has_orchestrator
        pools = dict.fromkeys(kinds, cores[:-1] if spare else cores)
    shares: dict[tuple[str, int], frozenset[int]] = {}
    for kind in kinds:
        members = [process for process in pinned if process.role == kind]
        for position, process in enumerate(members):
            share = _share(pools[kind], position, len(members))
            shares[process.role, process.index] = frozenset(share)
    return shares


def _share(pool: Sequence[int], position: int, num_members: int) -> Sequence[int]:
    if len(pool) < num_members:
        return [pool[position * len(pool) // num_members]]
    each = len(pool) // num_members
    return pool[position * each : (position + 1) * each]


def share_devices(
    offered: Sequence[str], processes: Sequence[ProcessPlan]
) -> dict[tuple[str, int], tuple[str, ...]]:
    """Return the accelerators of every process, in plan order.

    Raise ValueError for too few or repeated devices.
    """
    shares: dict[tuple[str, int], tuple[str, ...]] = {}
    next_device = 0
    for process in processes:
        share = tuple(offered[next_device : next_device + process.num_devices])
        next_device += process.num_devices
        if len(set(share)) < len(share):
            raise ValueError(
                f"of the devices {','.join(offered)}, given out in order, "
                f"{process.role}.{process.index} would get {','.join(share)}"
            )
        shares[process.role, process.index] = share
    if next_device > len(offered):
        raise ValueError(
            f"the stage needs {next_device} devices, this machine offers {len(offered)}"
        )
    return shares


def environment(
    base: Mapping[str, str],
    site: Site,
    start: str,
    cores: frozenset[int] | None,
    devices: tuple[str, ...] | None,
) -> dict[str, str]:
    """Return the environment of a local process.

    `cores` None: not pinned, one thread. `devices` None: a CPU run.
    """
    no_proxy = ",".join(filter(None, [base.get("NO_PROXY") or base.get("no_proxy"), LOOPBACK]))
    return {
        **base,
        **_common(site, start, len(cores) if cores else 1),
        "CUDA_VISIBLE_DEVICES": ",".join(devices or ()),
        "NO_PROXY": no_proxy,  # roles call one another on loopback, past any proxy
        "no_proxy": no_proxy,
        LAUNCHER_PID: str(os.getpid()),
    }


def cluster_environment(site: Site, start: str, cpus: int, num_nodes: int) -> dict[str, str]:
    return {
        **_common(site, start, cpus),
        **({INTERFACE: site.network.interface} if site.network and num_nodes > 1 else {}),
        "NO_PROXY": "*",
        "no_proxy": "*",
        LAUNCHER_PID: "0",  # Slurm chooses the parent process
    }


def _common(site: Site, start: str, cpus: int) -> dict[str, str]:
    threads = str(min(MAX_THREADS, cpus))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # libraries that iterate over sets make equal problems
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        START: start,
        TOKEN_FILE: STANDARD_INPUT,
        **({LOG_LEVEL: level} if (level := log_level()) else {}),
        SCALE: str(site.roles.deadline_scale),
        **site.environment,
    }
