"""Names of this run for the memory that vLLM's processes share; 0.26 and 0.32.

`name_shared_memory`, in each process before it makes any. Upstream: queues between an engine core and its workers (up to 250 MB an engine)
and, on CPU, memory that workers reduce in have random names in `/dev/shm`, and go with the processes that made them. A process that is
killed, or whose container is, removes nothing, and nobody knows whose it was; enough such ends fill the node's memory. So it is with the
host tier of a cache, whose file 0.26 keeps as long as the engine (0.32 only until all have opened it): `kv_offload` names it, by
`engine_id`. Remove when vLLM takes the names from its caller.
"""

from multiprocessing import shared_memory

RANDOM_CHARACTERS = 16


def name_shared_memory(name: str) -> None:
    """From now on what this process makes in shared memory has `name` in its own. Safe to call again."""
    # The standard library's own limit is that of FreeBSD; Linux takes 255 characters.
    shared_memory._SHM_NAME_PREFIX = f"/{name}"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(name) + 1 + RANDOM_CHARACTERS  # type: ignore[attr-defined]
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _name_reductions(name)


def _name_reductions(name: str) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

    upstream = _CPUSHMDistributed.make_group_name

    def make_group_name(communicator: CpuCommunicator) -> str:
        return f"{name}{upstream(communicator)}"

    if upstream.__module__ != __name__:
        _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
