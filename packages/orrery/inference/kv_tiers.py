"""Limit the size of vLLM's disk tier for KV blocks, and make all tiers work on CPU.

vLLM recomputes blocks of missing files. vLLM 0.32 refuses to offload on CPU, so `_stand_in`
replaces device copies by memory copies. Remove this module when vLLM does both.
"""

import contextlib
import ctypes
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu import spec as cpu_spec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from orrery.inference.kv_connectors import DISK_TIER, BoundedFolder


class BoundedFiles(FileSystemTierManager):
    def __init__(self, *, max_bytes: int, **options: Any) -> None:
        super().__init__(**options)
        self._files = BoundedFolder(
            Path(f"{self.file_mapper.base_path}_r{self.file_mapper.rank}"), max_bytes
        )
        self._enqueue = self._pool.enqueue_store
        self._pool.enqueue_store = self._enqueue_stores  # type: ignore[method-assign]

    def submit_load(self, job_metadata: Any) -> None:
        self._files.used(map(self.file_mapper.get_file_name, job_metadata.keys))
        super().submit_load(job_metadata)

    def _enqueue_stores(self, job_id: int, n_tasks: int, tasks: Iterable[Any]) -> None:
        self._enqueue(job_id, n_tasks, [partial(self._store, task) for task in tasks])

    def _store(self, task: Any) -> None:
        with self._files.writing(task.args[0], self._block_size):
            task()


class Tiers(TieringOffloadingSpec):
    pass


SecondaryTierFactory.register_tier(DISK_TIER, __name__, BoundedFiles.__name__)


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.at_s = 0.0

    def record(self, *_: Any) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "_Event") -> float:
        return max(1e-6, 1000 * (later.at_s - self.at_s))


class _Stream:
    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass


class _Platform:
    Stream = _Stream

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)

    def current_stream(self) -> _Stream:
        return _Stream()

    def stream(self, _: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_cuda_alike(self) -> bool:
        return True

    def is_rocm(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False


class _Torch:
    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _OnDevice(torch.Tensor):
    """A CPU tensor that passes vLLM's check for a device tensor."""

    is_xpu = True  # type: ignore[assignment]


def _copy(sources: torch.Tensor, destinations: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
    columns = (sources.tolist(), destinations.tolist(), sizes.tolist())
    for source, destination, size in zip(*columns, strict=True):
        ctypes.memmove(destination, source, size)


def _stand_in() -> None:
    handler = gpu_worker.SingleDirectionOffloadingHandler
    original = handler.__init__

    def on_device(self: Any, *args: Any, gpu_tensors: list[torch.Tensor], **options: Any) -> None:
        tensors = [tensor.as_subclass(_OnDevice) for tensor in gpu_tensors]
        original(self, *args, gpu_tensors=tensors, **options)

    gpu_worker.current_platform = cpu_spec.current_platform = _Platform()
    gpu_worker.torch = _Torch()
    gpu_worker._select_swap_blocks_fn = lambda *_, **__: _copy
    handler.__init__ = on_device


if current_platform.is_cpu() and not isinstance(gpu_worker.current_platform, _Platform):
    _stand_in()


class CpuTiers(Tiers):
    pass
