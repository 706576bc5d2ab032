"""Names of this run for the memory that vLLM's processes share (0.32).

`name_shared_memory`, in each process before it makes any. Upstream: queues between an engine core and its workers (250 MB each for the
answers of a worker) and, on CPU, memory that workers reduce in have random names in `/dev/shm`, and go with the processes that made them.
A process that is killed, or whose container is, removes nothing, and nobody knows whose it was; enough such ends fill the node's memory.
Remove when vLLM takes the names from its caller.

`without_name`, of an engine that is up. Upstream: a host tier is a file there, as large as the tier, for as long as the engine lives;
`kv_offload` names it, by `engine_id`. Once all processes have opened it, it needs no name, and without one it goes with the last of them,
however they end. vLLM removes it at an orderly end, and finds an empty one. Remove when `TieringOffloadingSpec` gives
`SharedOffloadRegion` a barrier, as 0.32's `CPUOffloadingSpec` does.
"""

from contextlib import suppress
from multiprocessing import shared_memory

from orrery.runtime.scratch import SHARED_MEMORY

RANDOM_CHARACTERS = 16


def name_shared_memory(name: str) -> None:
    """From now on what this process makes in shared memory has `name` in its own."""
    # The standard library's own limit is that of FreeBSD; Linux takes 255 characters.
    shared_memory._SHM_NAME_PREFIX = f"/{name}"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(name) + 1 + RANDOM_CHARACTERS  # type: ignore[attr-defined]
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _name_reductions(name)


def without_name(name: str) -> None:
    """Put an empty file in the place of each host tier that has `name` in its own."""
    for path in SHARED_MEMORY.glob(f"vllm_offload_{name}*"):
        with suppress(FileNotFoundError):  # an engine that is just asked to end
            path.unlink()
            path.touch()


def _name_reductions(name: str) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import (
        CpuCommunicator,
        _CPUSHMDistributed,
    )

    upstream = _CPUSHMDistributed.make_group_name

    def make_group_name(communicator: CpuCommunicator) -> str:
        return f"{name}{upstream(communicator)}"

    if upstream.__module__ != __name__:
        _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
