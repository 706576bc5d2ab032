"""Patch vLLM. `registry` gives the reasons."""

import asyncio
import contextlib
import errno
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import shared_memory
from multiprocessing.context import BaseContext
from typing import Any

import torch

from orrery.runtime.run_directory import SHARED_MEMORY
from orrery.wire.weight_wire.links import wait_for_progress

RANDOM_CHARACTERS = 16
MESSAGE_S = 2e-4


def import_without_compiler() -> None:
    if "vllm" in sys.modules or "torch._inductor" in sys.modules:
        return
    # None makes `import torch._inductor` raise ImportError.
    sys.modules["torch._inductor"] = None  # type: ignore[assignment]
    try:
        import vllm  # noqa: F401
    finally:
        del sys.modules["torch._inductor"]


def forget_moe_kernels(model: torch.nn.Module) -> None:
    """Make MoE layers prepack new weights. Call this before each reload on CPU."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Prepack a tied head's new weights. Call this after each reload on CPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def say_nothing_of_unloaded(model: torch.nn.Module, is_tied: bool) -> Iterator[None]:
    from vllm.model_executor.model_loader.reload import layerwise

    expected = {type(module).__name__ for module in model.modules() if not module._parameters}
    expected |= {"ParallelLMHead"} if is_tied else set()

    def is_news(record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return record.msg != "%s: Failed to load weights" or not expected.issuperset(arguments)

    log = logging.getLogger(layerwise.__name__)
    log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


def say_nothing_of_rounding() -> None:
    def is_news(record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        is_cast = str(record.msg).startswith("Attempted to load weight %s with dtype")
        return not (is_cast and arguments[1:2] == (torch.float32,))

    logging.getLogger("vllm.model_executor.models.utils").addFilter(is_news)


def has_stale_head(model: torch.nn.Module) -> bool:
    """Return whether a tied output head has its own parameter."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    modules = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads = [each for each in modules if isinstance(each, ParallelLMHead)]
    embeddings = [each for each in modules if not isinstance(each, ParallelLMHead)]
    return any(all(head.weight is not each.weight for each in embeddings) for head in heads)


def fork_engine_core() -> None:
    """Fork the engine core. OMP_NUM_THREADS must be 1, because forks lose threads."""
    import vllm.v1.engine.utils as engine_utils

    def forking() -> BaseContext:
        return multiprocessing.get_context("fork")

    _replace(engine_utils, "get_mp_context", forking)


def inspect_models_here() -> None:
    import vllm.model_executor.models.registry as registry

    def call(inspect: Callable[[], Any]) -> Any:
        return inspect()

    _replace(registry, "_run_in_subprocess", call)


def _replace(module: Any, name: str, by: Callable[..., Any]) -> None:
    if not hasattr(module, name):
        raise RuntimeError(
            f"vLLM has no {module.__name__}.{name} any more. See orrery/inference/patches/vllm.py"
        )
    setattr(module, name, by)


def draw_again_after_a_part() -> None:
    """Restore a request's random generator after each prefill chunk except the last."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample, bookkeep = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync
    if getattr(sample, "orrery", False):
        return

    def of_parts(self: Any) -> dict[int, torch.Generator]:
        rows = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        generators = self.input_batch.generators
        return {row: generators[row] for row in rows if row in generators}

    def sample_and_put_back(self: Any, *args: Any, **options: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in of_parts(self).values()]
        output = sample(self, *args, **options)
        for generator, state in states:
            generator.set_state(state)
        return output

    def bookkeep_without(self: Any, *args: Any, **options: Any) -> Any:
        hidden = of_parts(self)
        for row in hidden:
            del self.input_batch.generators[row]
        try:
            return bookkeep(self, *args, **options)
        finally:
            self.input_batch.generators.update(hidden)

    sample_and_put_back.orrery = True  # type: ignore[attr-defined]
    CPUModelRunner._sample = sample_and_put_back  # type: ignore[method-assign]
    CPUModelRunner._bookkeeping_sync = bookkeep_without  # type: ignore[method-assign]


def keep_adapters(manager: Any) -> None:
    if not hasattr(manager, "remove_all_adapters"):
        raise RuntimeError(
            "vLLM's LoRAModelManager has no remove_all_adapters any more. "
            "See orrery/inference/patches/vllm.py"
        )
    manager.remove_all_adapters = _nothing


def keep_kernels_of_experts() -> None:
    import vllm.model_executor.layers.fused_moe.layer as layer

    config = layer.FusedMoEConfig

    def without_adapters(*args: Any, **kwargs: Any) -> Any:
        return config(*args, **kwargs | {"is_lora_enabled": False})

    layer.FusedMoEConfig = without_adapters


def _nothing() -> None: ...


def route_in_float32() -> None:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    init = GateLinear.__init__

    def init_wide(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if self.out_dtype is None and self.is_unquantized:
            self.set_out_dtype(torch.float32)

    GateLinear.__init__ = init_wide


def answer_for_every_rank() -> None:
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    async def collective_rpc_async(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        call = ("collective_rpc", method, timeout, args, kwargs)
        ranks = await asyncio.gather(
            *(self._call_utility_async(*call, engine=engine) for engine in self.core_engines)
        )
        return [result for rank in ranks for result in rank]

    DPLBAsyncMPClient.collective_rpc_async = collective_rpc_async  # type: ignore[method-assign]


def exchange_unequal_parts() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _all_gatherv  # type: ignore[method-assign,assignment]
    CpuCommunicator.reduce_scatterv = _reduce_scatterv  # type: ignore[method-assign]


def _all_gatherv(
    self: Any,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Gather `sizes[i]` rows from rank i, padded because gloo needs equal sizes."""
    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]  # type: ignore[misc]
    if dim != 0:
        raise NotImplementedError(f"all_gatherv on CPU takes dim 0, not {dim}")
    rows = sizes or [len(input_)] * self.world_size
    longest = max(rows)
    mine = input_.new_zeros((longest, *input_.shape[1:]))
    mine[: len(input_)] = input_
    found = input_.new_empty((self.world_size * longest, *input_.shape[1:]))
    torch.distributed.all_gather_into_tensor(found, mine, group=self.device_group)
    parts = zip(found.split(longest), rows, strict=True)
    return torch.cat([part[:count] for part, count in parts])


def _reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    if dim not in (0, -input_.dim()):
        raise NotImplementedError(f"reduce_scatterv on CPU takes dim 0, not {dim}")
    rows = sizes or [len(input_) // self.world_size] * self.world_size
    count = rows[self.rank_in_group]
    found = input_.new_empty((self.world_size * count, *input_.shape[1:]))
    torch.distributed.all_to_all_single(
        found, input_.contiguous(), [count] * self.world_size, rows, group=self.device_group
    )
    return found.view(self.world_size, count, *input_.shape[1:]).sum(0)


def compute_own_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply
    if getattr(apply, "orrery", False):
        return

    def apply_own(self: Any, *args: Any, **options: Any) -> None:
        expert_map = options.get("expert_map")
        if expert_map is not None:  # index of all experts → local index or −1
            local = expert_map[options["topk_ids"]]
            is_own = local >= 0
            options["topk_weights"] = options["topk_weights"] * is_own
            options["topk_ids"] = torch.where(is_own, local, 0).to(options["topk_ids"].dtype)
        apply(self, *args, **options)

    apply_own.orrery = True  # type: ignore[attr-defined]
    CPUUnquantizedExperts.apply = apply_own  # type: ignore[method-assign]


def meet_at_one_address() -> None:
    import vllm.distributed.utils as vllm_stores

    vllm_stores.TCPStore = _store  # type: ignore[attr-defined,assignment,misc]
    sys.modules["torch.distributed.rendezvous"].TCPStore = _store  # type: ignore[attr-defined]


def _store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    **options: Any,
) -> Any:
    from torch.distributed import DistNetworkError, TCPStore

    if is_master and options.get("master_listen_fd") is None:
        try:
            listener = socket.create_server((host_name, port))
        except OSError as error:  # vLLM tries another port if the message contains `name`
            name = errno.errorcode.get(error.errno or 0, "")
            raise DistNetworkError(f"{name} {host_name}:{port}: {error}") from error
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()
    return TCPStore(host_name, port, world_size, is_master, **options)


def name_shared_memory(name: str) -> None:
    # Python keeps these names short for FreeBSD. Linux allows 255 characters.
    shared_memory._SHM_NAME_PREFIX = f"/{name}"  # type: ignore[attr-defined]
    length = len(name) + 1 + RANDOM_CHARACTERS
    shared_memory._SHM_SAFE_NAME_LENGTH = length  # type: ignore[attr-defined]
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _name_reductions(name)


def unlink_host_tiers(name: str) -> None:
    """Unlink KV offloading's shared memory. Call this once all processes have opened it.

    Leave an empty file, because vLLM unlinks the path later.
    """
    for path in SHARED_MEMORY.glob(f"vllm_offload_{name}*"):
        with contextlib.suppress(FileNotFoundError):  # the engine may be ending
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


def pause_beside_unread_blocks() -> None:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    if getattr(Scheduler.has_finished_requests, "orrery", False):
        return
    original = Scheduler.has_finished_requests

    def has_finished_requests(self: Any) -> bool:
        if self.pause_state == PauseState.PAUSED_ALL:
            return bool(self.finished_req_ids)
        return original(self)

    has_finished_requests.orrery = True  # type: ignore[attr-defined]
    Scheduler.has_finished_requests = has_finished_requests  # type: ignore[method-assign]


def bootstrap_on_one_address() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (
        mooncake_connector as connector,
    )

    server = connector.MooncakeBootstrapServer
    if not isinstance(server, type):
        return

    def on_host(_everywhere: str, port: int) -> Any:
        return server(os.environ["VLLM_HOST_IP"], port)

    connector.MooncakeBootstrapServer = on_host  # type: ignore[assignment,misc]


def pulls_that_end_with_their_engine() -> None:
    """Let `give_up_pulls_of` end Mooncake's KV reads from an engine."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
        MooncakeConnectorWorker,
    )

    if hasattr(MooncakeConnectorWorker.receive_kv_from_single_worker, "orrery"):
        return
    original = MooncakeConnectorWorker.receive_kv_from_single_worker

    async def receive(self: Any, worker_addr: str, pull_metas: dict[str, Any]) -> None:
        engine_id = next(iter(pull_metas.values())).remote_engine_id
        receiving = asyncio.ensure_future(original(self, worker_addr, pull_metas))
        ended = asyncio.ensure_future(_end_of(self, engine_id).wait())
        await asyncio.wait({receiving, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in (receiving, ended):
            task.cancel()
        await asyncio.wait({receiving})
        if receiving.cancelled():
            left = [name for name, pull in pull_metas.items() if pull.pull_tasks_count > 0]
            self._handle_failed_recv(pull_metas, left, f"engine {engine_id} has ended")

    receive.orrery = True  # type: ignore[attr-defined]
    MooncakeConnectorWorker.receive_kv_from_single_worker = receive  # type: ignore[method-assign]


async def give_up_pulls_of(worker: Any, engine_id: str) -> None:
    """Fail current and later reads from an ended engine. Call this in Mooncake's event loop.

    Never call this for a live engine, which could write into freed blocks.
    """
    _end_of(worker, engine_id).set()


def _end_of(worker: Any, engine_id: str) -> asyncio.Event:
    events: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
    ends: dict[str, asyncio.Event] = vars(worker).setdefault("orrery_ends", events)
    return ends[engine_id]


def device_index_on_cpu() -> None:
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0


def sleep_for_messages() -> None:
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        shm_broadcast.sched_yield = partial(time.sleep, MESSAGE_S)


def nixl_that_waits() -> None:
    import torch
    from vllm.distributed import nixl_utils

    if torch.accelerator.is_available() or hasattr(nixl_utils._load_nixl_attr, "orrery"):
        return
    original = nixl_utils._load_nixl_attr

    def load(name: str) -> Any:
        value = original(name)  # None if NIXL is missing
        if value is not None:
            wait_for_progress()
        return value

    load.orrery = True  # type: ignore[attr-defined]
    nixl_utils._load_nixl_attr = load
