"""What vLLM loads in each of its processes (entry point `orrery` of `vllm.general_plugins`). Cheap, and safe to call again.

- Registers the receivers of weights and of adapters, by name, so that they are imported only where a worker lives.
- Ties every vLLM process to the one that started it: none outlives a killed server.
- Gives the memory that they share names of this run (SHARED): who is killed removes nothing, but who comes after knows what to remove.
"""

import os

from orrery.inference.assemble import ADAPTER_BACKEND, BACKEND
from orrery.runtime.parent_watch import die_with_parent

SHARED = "ORRERY_SHARED_MEMORY"  # `runtime.scratch.role_memory_prefix`

_registered = False


def register() -> None:
    """Called by vLLM in each process that it spawns, and by `server` before it starts anything."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "orrery.inference.receiver", "Receiver")
    WeightTransferEngineFactory.register_engine(
        ADAPTER_BACKEND, "orrery.inference.adapters", "AdapterReceiver"
    )
    from orrery.inference import releases
    from orrery.inference.patches import vllm_kv_transfer, vllm_shared_memory, vllm_whole_answers

    if SHARED in os.environ:
        vllm_shared_memory.name_shared_memory(os.environ[SHARED])
    releases.correct_engine()
    vllm_whole_answers.hold_outputs()
    vllm_kv_transfer.pause_beside_unread_blocks()
    if (
        "VLLM_MOONCAKE_BOOTSTRAP_PORT" in os.environ
    ):  # of `kv_transfer`: this engine hands caches over through Mooncake
        vllm_kv_transfer.bootstrap_on_one_address()
        vllm_kv_transfer.device_index_on_cpu()
        vllm_kv_transfer.pulls_that_end_with_their_engine()
    if "VLLM_NIXL_SIDE_CHANNEL_PORT" in os.environ:
        vllm_kv_transfer.nixl_that_waits()
    # A forked engine core inherits this registration and does not load plugins again, so the tie is made at the fork itself …
    os.register_at_fork(after_in_child=die_with_parent)
    # … while a spawned one (or a worker) is a new interpreter that loads them: multiprocessing tells us that it is a child.
    if _is_multiprocessing_child():
        die_with_parent()


def _is_multiprocessing_child() -> bool:
    import multiprocessing

    return multiprocessing.parent_process() is not None
