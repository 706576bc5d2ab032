"""Receive adapters: copy the published low-rank factors into the running engine.

- In: the path of a version on the wire `adapters`. Out: `held`, as in `receiver.py`.
- The engine has one adapter (`assemble.blank_adapter`). An update overwrites its factors while the
  engine is paused. vLLM's `load_inplace` would read old files again at each step of an old request.
- A factor is "resident" if fingerprinted in its buffer, "as_consumed" if ranks hold slices of it.
- Every projection must get its factors. An error names the damaged or missing tensor.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from orrery.inference.patches.vllm import keep_adapters
from orrery.inference.receiver import AS_CONSUMED, RESIDENT, Backend, InitInfo, UpdateInfo, damage
from orrery.wire.fingerprint import tensor_fingerprint
from orrery.wire.weight_wire import read_weights


class AdapterReceiver(Backend):
    """vLLM's weight-transfer backend `orrery_adapters`."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.held = {}
        self._tensors: dict[str, torch.Tensor] = {}
        keep_adapters(self.model.lora_manager)

    def _start(self) -> None:
        self._tensors = {}

    def _receive(self, update: UpdateInfo) -> None:
        what = f"adapters version {update.version}"
        try:
            tensors = dict(read_weights(update.path))
        except SafetensorError as error:
            raise ValueError(f"{what}: {damage(Path(update.path)) or error}") from error
        places = self._buffers().keys()
        for names, verb in (
            (tensors.keys() - places, "has no place in this model"),
            (places - tensors.keys(), "is missing"),
        ):
            if names:
                raise ValueError(f"{what}: tensor {min(names)!r} {verb}")
        self._tensors = tensors

    def _finish(self, is_whole: bool) -> dict[str, tuple[int, str]]:
        if not is_whole:
            return {}
        slots = enumerate(self.model.lora_manager.lora_index_to_id)
        [slot] = [index for index, adapter in slots if adapter is not None]
        for module, parts in self._adapted():
            a, b = ([self._tensors[_names(part)[factor]] for part in parts] for factor in (0, 1))
            module.set_lora(slot, *((a, b) if len(parts) > 1 else (a[0], b[0])))
        buffers = self._buffers()
        held = {
            name: _attest(tensor, buffers[name][slot, 0]) for name, tensor in self._tensors.items()
        }
        self._tensors = {}
        return held

    def shutdown(self) -> None:
        self.held = {}

    def _adapted(self) -> Iterator[tuple[Any, list[str]]]:
        """Yield modules with their projections. A fused module has several."""
        manager = self.model.lora_manager
        for name, module in manager.modules.items():
            yield module, manager.packed_modules.get(name) or [name]

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return vLLM's buffers by PEFT name: A [slots, 1, rank, in], B [slots, 1, out, rank]."""
        found: dict[str, torch.Tensor] = {}
        for module, parts in self._adapted():
            pairs = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
            for part, pair in zip(parts, pairs, strict=True):
                found.update(zip(_names(part), pair, strict=True))
        return found


def _names(module: str) -> tuple[str, str]:
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _attest(tensor: torch.Tensor, buffer: torch.Tensor) -> tuple[int, str]:
    """Return a factor's fingerprint, read from `buffer` [rows, columns] if that holds the whole."""
    sizes = zip(tensor.shape, buffer.shape, strict=True)
    if tensor.dtype != buffer.dtype or any(size > room for size, room in sizes):
        return tensor_fingerprint(tensor), AS_CONSUMED
    return tensor_fingerprint(buffer[: tensor.shape[0], : tensor.shape[1]].contiguous()), RESIDENT
