"""Adapters in: puts the low-rank factors that the trainer published beside the weights that the engine started with.

- In: the path of a version on the wire `adapters`, tensors by PEFT name. Out: `held`, name → (fingerprint, how), as `receiver` has it.
- One adapter, there since the start (`adapter_start`), which every request names. An update writes its factors over, between two steps of
  paused requests: those in flight go on with the new ones, and `finish_weight_update` gives their tokens the new version.
- vLLM's own way (`/v1/load_lora_adapter` with `load_inplace`) is not for requests in flight. It marks the adapter's requests, and each step
  that has a marked one reads the files again, those of the version that it was made under: an old request brings old factors back.
- Cached prefixes are told apart by the requests' salts; the adapter's name and path, which vLLM adds to a block's key, stay the same.
- A factor is read back from the buffers that are computed with ("resident"); where ranks hold slices, it is taken on its way in.
- Always: every projection that takes an adapter gets one. A version that does not fit, or is damaged, fails the update by the tensor's
  name, and the engine has nothing to attest.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from orrery.inference.patches.vllm_adapters import keep_adapters
from orrery.inference.receiver import AS_CONSUMED, RESIDENT, Backend, InitInfo, UpdateInfo, damage
from orrery.transport.fingerprint import tensor_fingerprint
from orrery.transport.weight_wire import read_weights


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
        [slot] = [
            index
            for index, adapter in enumerate(self.model.lora_manager.lora_index_to_id)
            if adapter is not None
        ]  # the one adapter's
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
        """(vLLM's module, names of its projections: several of a fused one)."""
        manager = self.model.lora_manager
        for name, module in manager.modules.items():
            yield module, manager.packed_modules.get(name) or [name]

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of all factors by PEFT name: A [slots, 1, rank, in] and B [slots, 1, out, rank]."""
        found: dict[str, torch.Tensor] = {}
        for module, parts in self._adapted():
            for part, *pair in zip(
                parts, module.lora_a_stacked, module.lora_b_stacked, strict=True
            ):
                found.update(zip(_names(part), pair, strict=True))
        return found


def _names(module: str) -> tuple[str, str]:
    """PEFT's names of a projection's two factors."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _attest(tensor: torch.Tensor, buffer: torch.Tensor) -> tuple[int, str]:
    """The fingerprint of a factor, from the buffer [rows, columns] where it stands there whole."""
    if tensor.dtype != buffer.dtype or any(
        size > room for size, room in zip(tensor.shape, buffer.shape, strict=True)
    ):
        return tensor_fingerprint(tensor), AS_CONSUMED
    return tensor_fingerprint(buffer[: tensor.shape[0], : tensor.shape[1]].contiguous()), RESIDENT
