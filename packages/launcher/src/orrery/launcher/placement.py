"""Placement: which cores and devices each process of a stage gets. Pure.

Cores, the rule (`share_cores`):
- Trainers and engines compute and are pinned; orchestrator, router and report are not, they fill the gaps.
- Where a stage has both trainers and engines, each kind gets a half of the cores (the trainers the odd one), so that neither can stall the
  other; within a kind every process gets an equal run of neighbouring cores, and shares when there are fewer cores than processes.
- Where only one kind computes beside an orchestrator and cores are left over, one core stays free for it.
"""

from collections.abc import Sequence

from orrery.manifest.plan import ProcessPlan

KINDS = ("trainer", "inference")


def share_cores(
    cores: Sequence[int], processes: Sequence[ProcessPlan]
) -> dict[tuple[str, int], frozenset[int]]:
    """The cores of every pinned process, by (role, index); the others may run anywhere."""
    cores = sorted(cores)
    kinds = [kind for kind in KINDS if any(process.role == kind for process in processes)]
    if not kinds:
        return {}
    if len(kinds) == 2 and len(cores) > 1:
        half = (len(cores) + 1) // 2
        pools = {"trainer": cores[:half], "inference": cores[half:]}
    else:
        pinned = [process for process in processes if process.role in kinds]
        spare = (
            len(kinds) == 1
            and len(cores) > len(pinned)
            and any(process.role == "orchestrator" for process in processes)
        )
        pools = {kind: cores[:-1] if spare else cores for kind in kinds}
    shares: dict[tuple[str, int], frozenset[int]] = {}
    for kind in kinds:
        members = [process for process in processes if process.role == kind]
        for position, process in enumerate(members):
            shares[process.role, process.index] = frozenset(
                _run(pools[kind], position, len(members))
            )
    return shares


def _run(pool: Sequence[int], position: int, num_members: int) -> Sequence[int]:
    if len(pool) < num_members:
        return [pool[position * len(pool) // num_members]]
    each = len(pool) // num_members
    return pool[position * each : (position + 1) * each]


def share_devices(
    offered: Sequence[str], processes: Sequence[ProcessPlan]
) -> dict[tuple[str, int], tuple[str, ...]]:
    """Accelerators by name, in plan order. What is offered twice may serve two processes, but not one.

    Raises ValueError where they do not suffice, or one process would get the same device twice.
    """
    shares: dict[tuple[str, int], tuple[str, ...]] = {}
    following = 0
    for process in processes:
        share = tuple(offered[following : following + process.num_devices])
        following += process.num_devices
        if len(set(share)) < len(share):
            raise ValueError(
                f"of the devices {','.join(offered)}, given out in order, {process.role}.{process.index} would get {','.join(share)}"
            )
        shares[process.role, process.index] = share
    if following > len(offered):
        raise ValueError(f"the stage needs {following} devices, this machine offers {len(offered)}")
    return shares
