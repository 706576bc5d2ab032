"""A network's tensors under their checkpoint names, one at a time.

- An HF tensor is a box of a parameter or buffer. Experts are stacked here and separate in files.
- Adapters (`lora.py`) have no checkpoint names. Only whole tensors are merged with them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from orrery.models.causal_lm import CausalLm
from orrery.models.families import hf_names
from orrery.models.lora import adapters, merged
from orrery.models.placement import (
    Box,
    full_tensor,
    intersection,
    local_box,
    local_tensor,
    relative,
    slices,
)

# Added to parameter names by activation checkpointing and torch.compile.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class HfTensor:
    """A checkpoint's tensor: the box `box` of our parameter.

    A single expert's tensor lacks the first dimension.
    """

    name: str
    parameter_name: str
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def expert(self) -> int | None:
        return self.box[0][0] if len(self.shape) < len(self.box) else None

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view_of(self, whole: Tensor) -> Tensor:
        part = whole[slices(self.box)]
        return part if self.expert is None else part[0]


def unwrapped_name(parameter_name: str) -> str:
    for wrapper in _WRAPPERS:
        parameter_name = parameter_name.replace(wrapper, "")
    return parameter_name


def hf_tensors(module: CausalLm) -> list[HfTensor]:
    """Return the checkpoint's tensors in writing order. Not a collective."""
    patterns = hf_names(module)
    tensors = []
    for name, tensor in _checkpoint_state(module).items():
        key, layer = unwrapped_name(name), ""
        if key.startswith("layers."):
            layer = key.split(".")[1]
            key = key.replace(f"layers.{layer}.", "layers.{layer}.", 1)
        parts = patterns[key]
        parts = (parts,) if isinstance(parts, str) else parts
        for index, part in enumerate(parts):
            tensors += _split(part.replace("{layer}", layer), name, tensor, index, len(parts))
    return tensors


def _split(hf_name: str, name: str, tensor: Tensor, part: int, num_parts: int) -> list[HfTensor]:
    is_stacked, dtype = "{expert}" in hf_name, tensor.dtype
    sides = [(0, size) for size in tensor.shape]
    if num_parts > 1:
        size = tensor.shape[is_stacked] // num_parts
        sides[is_stacked] = (part * size, (part + 1) * size)
    sizes = tuple(stop - start for start, stop in sides)
    if not is_stacked:
        return [HfTensor(hf_name, name, tuple(sides), sizes, dtype)]
    experts = []
    for e in range(tensor.shape[0]):
        box = ((e, e + 1), *sides[1:])
        experts.append(HfTensor(hf_name.replace("{expert}", str(e)), name, box, sizes[1:], dtype))
    return experts


def _checkpoint_state(module: CausalLm) -> dict[str, Tensor]:
    """Return the parameters without adapters, then the persistent buffers."""
    adapting = {parameter for _, adapter in adapters(module) for parameter in adapter.parameters()}
    named = module.named_parameters()
    state: dict[str, Tensor] = {name: one for name, one in named if one not in adapting}
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                state[name] = buffer
    return state


@torch.no_grad()
def named_hf_tensors(module: CausalLm) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, detached tensor) in the order of `hf_tensors`.

    A collective on a sharded module. On others, tensors are views: copy them if they must outlive
    the next optimizer step.
    """
    state, adapter_of = _checkpoint_state(module), dict(adapters(module))
    # Adjacent tensors share a parameter, so one gathered parameter is alive at a time.
    for parameter_name, group in groupby(hf_tensors(module), key=lambda hf: hf.parameter_name):
        whole = full_tensor(state[parameter_name].detach())
        if (adapter := adapter_of.get(parameter_name)) is not None:
            whole = merged(whole, adapter)
        for hf in group:
            yield hf.name, hf.view_of(whole)
        del whole


@torch.no_grad()
def named_peft_tensors(module: CausalLm, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (PEFT name, tensor in `dtype`) of all adapters. A collective if sharded.

    `lora_A` is [rank, in]. `lora_B` [out, rank] includes the scale, as if alpha were the rank.
    Parts of a parameter share A. Experts are not supported.
    """
    groups = groupby(hf_tensors(module), key=lambda hf: hf.parameter_name)
    parts = {name: list(group) for name, group in groups}
    for parameter_name, adapter in adapters(module):
        a, b = full_tensor(adapter.a.detach()), full_tensor(adapter.b.detach()) * adapter.scale
        for hf in parts[parameter_name]:
            prefix = f"base_model.model.{hf.name.removesuffix('.weight')}"
            yield f"{prefix}.lora_A.weight", a.to(dtype)
            yield f"{prefix}.lora_B.weight", b[slices(hf.box[:1])].to(dtype)


@torch.no_grad()
def named_hf_slices(
    module: CausalLm, replacements: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[HfTensor, Box, Tensor]]:
    """Yield (checkpoint tensor, box in it, this rank's data). No collective, no copy.

    Replicas yield equal boxes. `replacements` replace shards, by our parameter name.
    """
    state = _checkpoint_state(module)
    boxes = {name: local_box(tensor) for name, tensor in state.items()}
    for hf in hf_tensors(module):
        held = boxes[hf.parameter_name]
        common = intersection(held, hf.box)
        if common is None:
            continue
        shard = (replacements or {}).get(hf.parameter_name, state[hf.parameter_name])
        local = local_tensor(shard.detach())[slices(relative(common, held))]
        box = relative(common, hf.box)
        yield (hf, box, local) if hf.expert is None else (hf, box[1:], local[0])
