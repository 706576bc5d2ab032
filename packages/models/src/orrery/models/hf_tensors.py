"""A network's tensors as a checkpoint names them: whole or in parts, one at a time.

- An HF tensor is a box of one of our parameters or buffers, as one expert's gate is; mostly the box is all of it.
- Adapters (`lora.py`) have no names: whole tensors come with them merged, slices as they lie. By themselves they have PEFT's.
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

# What activation checkpointing and torch.compile put into the names of the parameters that they wrap.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a checkpoint: the box `box` of our parameter; without its first dimension where that is one expert's."""

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

    def of(self, whole: Tensor) -> Tensor:
        """This tensor, a view of the whole parameter."""
        part = whole[slices(self.box)]
        return part if self.expert is None else part[0]


def plain_name(parameter_name: str) -> str:
    """As it is in a network that nothing wraps."""
    for wrapper in _WRAPPERS:
        parameter_name = parameter_name.replace(wrapper, "")
    return parameter_name


def hf_tensors(module: CausalLm) -> list[HfTensor]:
    """Every tensor of the module's checkpoint in writing order; sizes only, no data, no collective."""
    patterns = hf_names(module)
    tensors = []
    for name, tensor in _state(module).items():
        plain = plain_name(name)
        layer = plain.split(".")[1] if plain.startswith("layers.") else ""
        hf_name = patterns[
            plain.replace(f"layers.{layer}.", "layers.{layer}.", 1) if layer else plain
        ]
        parts = (hf_name,) if isinstance(hf_name, str) else hf_name
        for index, part in enumerate(parts):
            tensors += _taken_apart(part.replace("{layer}", layer), name, tensor, index, len(parts))
    return tensors


def _taken_apart(
    hf_name: str, name: str, tensor: Tensor, part: int, num_parts: int
) -> list[HfTensor]:
    stacked, shape = "{expert}" in hf_name, tuple(tensor.shape)
    sides = [(0, size) for size in shape]
    if num_parts > 1:
        size = shape[stacked] // num_parts
        sides[stacked] = (part * size, (part + 1) * size)
    sizes = tuple(stop - start for start, stop in sides)
    if not stacked:
        return [HfTensor(hf_name, name, tuple(sides), sizes, tensor.dtype)]
    return [
        HfTensor(
            hf_name.replace("{expert}", str(e)),
            name,
            ((e, e + 1), *sides[1:]),
            sizes[1:],
            tensor.dtype,
        )
        for e in range(shape[0])
    ]


def _state(module: CausalLm) -> dict[str, Tensor]:
    """What a checkpoint holds: parameters but adapters, then the buffers that are not computed."""
    adapting = {parameter for _, adapter in adapters(module) for parameter in adapter.parameters()}
    state: dict[str, Tensor] = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter not in adapting
    }
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                state[name] = buffer
    return state


@torch.no_grad()
def named_hf_tensors(module: CausalLm) -> Iterator[tuple[str, Tensor]]:
    """(HF name, detached tensor) of every checkpoint tensor, in `hf_tensors` order; one parameter is gathered at a time.

    Views of the parameters where nothing is sharded: copy what must outlive the next optimizer step.
    """
    state, adapter_of = _state(module), dict(adapters(module))
    # The tensors of a parameter follow one another, so one gathered parameter is alive at a time.
    for parameter_name, group in groupby(hf_tensors(module), key=lambda hf: hf.parameter_name):
        whole = full_tensor(state[parameter_name].detach())
        if (adapter := adapter_of.get(parameter_name)) is not None:
            whole = merged(whole, adapter)
        for hf in group:
            yield hf.name, hf.of(whole)
        del whole


@torch.no_grad()
def named_peft_tensors(module: CausalLm, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(PEFT name, tensor in `dtype`) of every projection's adapter: `lora_A` [rank, in], and `lora_B` [out, rank] with the scale in it.

    So it is an adapter whose alpha is its rank. A parameter that a checkpoint holds in parts gives each part its rows of B and all of A.
    One adapter is gathered at a time. Those of stacked experts are not for this.
    """
    named = {
        name: list(group)
        for name, group in groupby(hf_tensors(module), key=lambda hf: hf.parameter_name)
    }
    for parameter_name, adapter in adapters(module):
        a, b = full_tensor(adapter.a.detach()), full_tensor(adapter.b.detach()) * adapter.scale
        for hf in named[parameter_name]:
            prefix = f"base_model.model.{hf.name.removesuffix('.weight')}"
            yield f"{prefix}.lora_A.weight", a.to(dtype)
            yield f"{prefix}.lora_B.weight", b[slices(hf.box[:1])].to(dtype)


@torch.no_grad()
def named_hf_slices(
    module: CausalLm, instead: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[HfTensor, Box, Tensor]]:
    """(checkpoint tensor, box of it, this rank's data in that box), for all that this rank holds; no collective, no copy.

    The box has one `[start, stop)` a dimension of `HfTensor.shape`. Replicas yield the same boxes. `instead`, by name of our parameter:
    shards that stand in for the module's own, as merged ones do.
    """
    state = _state(module)
    boxes = {name: local_box(tensor) for name, tensor in state.items()}
    for hf in hf_tensors(module):
        held = boxes[hf.parameter_name]
        common = intersection(held, hf.box)
        if common is None:
            continue
        shard = (instead or {}).get(hf.parameter_name, state[hf.parameter_name])
        local = local_tensor(shard.detach())[slices(relative(common, held))]
        box = relative(common, hf.box)
        yield (hf, box, local) if hf.expert is None else (hf, box[1:], local[0])
