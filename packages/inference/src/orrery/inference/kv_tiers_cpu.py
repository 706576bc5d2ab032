"""vLLM's host and disk tiers for an engine on CPU: the same managers, policies and files as on GPUs, with memory copies for device copies.

vLLM refuses its native offloading on CPU, where a device's cache is host memory already; what a GPU run does is tried out here, on machines
without one. Loaded by vLLM through `spec_module_path`, in the process that holds the worker. Versions: 0.32.

- A copy is a `memmove` that is over when it returns, so streams have nothing to order and events nothing to wait for.
- vLLM's own modules are told so by the names that they look up; nothing outside `v1/kv_offload/cpu` sees it.
"""

import contextlib
import ctypes
import time
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu import spec as cpu_spec

from orrery.inference.kv_disk import Tiers


class _Event:
    """A moment: what it marks has happened when it is recorded."""

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
    """The CPU platform, as the two modules ask about a device."""

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
    """torch, with events that need no device."""

    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _OnDevice(torch.Tensor):
    """A tensor of the cache: vLLM asserts that its device side is on a device."""

    is_xpu = True  # type: ignore[assignment]


def _copy(sources: torch.Tensor, destinations: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
    """Copy `sizes[i]` bytes from address `sources[i]` to `destinations[i]`."""
    for source, destination, size in zip(
        sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(destination, source, size)


def _stand_in() -> None:
    """Once a process; a vLLM that has moved these names fails here, by name."""
    handler = gpu_worker.SingleDirectionOffloadingHandler
    original = handler.__init__

    def on_device(self: Any, *args: Any, gpu_tensors: list[torch.Tensor], **options: Any) -> None:
        original(
            self,
            *args,
            gpu_tensors=[tensor.as_subclass(_OnDevice) for tensor in gpu_tensors],
            **options,
        )

    gpu_worker.current_platform = cpu_spec.current_platform = _Platform()
    gpu_worker.torch = _Torch()
    gpu_worker._select_swap_blocks_fn = lambda *_, **__: _copy
    handler.__init__ = on_device


if current_platform.is_cpu() and not isinstance(gpu_worker.current_platform, _Platform):
    _stand_in()


class CpuTiers(Tiers):
    """`Tiers` of an engine on CPU."""
