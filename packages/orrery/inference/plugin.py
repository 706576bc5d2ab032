"""The entry point `orrery` of `vllm.general_plugins`, loaded in each vLLM process.

- Registers the receivers of weights and adapters by name. Only a worker imports them.
- Ties every vLLM process to its parent, so none survives a killed server.
- Names the run in shared memory (SHARED), so that the next start can remove it.
"""

import multiprocessing
import os

from orrery.inference.assemble import ADAPTER_BACKEND, BACKEND
from orrery.inference.patches import registry
from orrery.runtime.parent_watch import die_with_parent

SHARED = "ORRERY_SHARED_MEMORY"  # `runtime.scratch.role_memory_prefix`

_registered = False


def register() -> None:
    """Register once a process. `server` calls it before vLLM does."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "orrery.inference.receiver", "Receiver")
    adapters = ("orrery.inference.adapters", "AdapterReceiver")
    WeightTransferEngineFactory.register_engine(ADAPTER_BACKEND, *adapters)
    registry.correct_engine(os.environ.get(SHARED))
    os.register_at_fork(after_in_child=die_with_parent)  # a fork does not load plugins again
    if multiprocessing.parent_process() is not None:  # a spawned child does
        die_with_parent()
