"""Quantize weights to FP8 once per optimizer step. Engines receive the same values.

An FP8 layer keeps quantized weights in lists `<name>_fp8`. Each forward pass quantizes a
weight if its list is empty.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from orrery.kernels.fp8.products import Parts, weight_parts
from orrery.kernels.fp8.quantize import BLOCK, quantize_weight
from orrery.manifest.errors import OrreryError
from orrery.models.causal_lm import CausalLm
from orrery.models.hf_folder import HfTensor
from orrery.models.latent_attention import LatentAttention
from orrery.models.layers import Attention, Experts, FeedForward
from orrery.models.placement import (
    Box,
    intersection,
    local_box,
    local_tensor,
    relative,
    slices,
)
from orrery.models.weights import hf_tensors
from orrery.wire.weight_wire.fp8_blocks import SCALE, in_blocks


def products(network: nn.Module) -> Iterator[tuple[Parts, list[Tensor]]]:
    """Yield (list `<name>_fp8`, unquantized weights) of each FP8 matrix product."""
    for module in network.modules():
        found: list[tuple[Parts | None, list[Tensor]]] = []
        if isinstance(module, Attention):
            qkv = [each.weight for each in (module.q_proj, module.k_proj, module.v_proj)]
            found = [(module.qkv_fp8, qkv), (module.o_fp8, [module.o_proj.weight])]
        elif isinstance(module, LatentAttention):
            found = [
                (module.q_b_fp8, [module.q_b_proj.weight]),
                (module.o_fp8, [module.o_proj.weight]),
            ]
        elif isinstance(module, FeedForward):
            gate_up = [module.gate_proj.weight, module.up_proj.weight]
            found = [(module.gate_up_fp8, gate_up), (module.down_fp8, [module.down_proj.weight])]
        elif isinstance(module, Experts):
            found = [
                (module.gate_up_fp8, [module.gate_up_proj]),
                (module.down_fp8, [module.down_proj]),
            ]
        yield from ((parts, weights) for parts, weights in found if parts is not None)


class WeightCache:
    """FP8 weights of a network without FSDP. The forward pre-hook `refresh` updates them."""

    def __init__(self, network: nn.Module):
        self._network = network
        self._seen: dict[int, tuple[tuple[int, int], ...]] = {}

    @torch.no_grad()
    def refresh(self, *_: object) -> None:
        for index, (parts, weights) in enumerate(products(self._network)):
            seen = tuple((id(weight), weight._version) for weight in weights)
            if self._seen.get(index) != seen:
                parts[:] = []
                parts[:] = weight_parts(weights[0] if len(weights) == 1 else torch.cat(weights))
                self._seen[index] = seen


class SentWeights:
    """This rank's FP8 weights for engines, at constant addresses.

    Weights are quantized from bfloat16, as in training. `refresh` raises OrreryError if this rank's
    shard splits an FP8 block.
    """

    def __init__(self, network: CausalLm):
        self._network = network
        of = {id(weight) for _, weights in products(network) for weight in weights}
        named = network.named_parameters()
        self.names = {name for name, weight in named if id(weight) in of}
        self.values: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}

    def is_sent(self, tensor: HfTensor) -> bool:
        return tensor.parameter_name in self.names

    @torch.no_grad()
    def refresh(self) -> None:
        weights = dict(self._network.named_parameters())
        for name in self.names:
            box = local_box(weights[name])
            if any(side % BLOCK for sides in box[-2:] for side in sides):
                raise OrreryError(
                    f"model.fp8: this rank holds {list(box)} of {name}, not whole blocks of "
                    f"{BLOCK} × {BLOCK}; lower trainer.mesh.dp_shard, or set "
                    "transport.weights to 'files'"
                )
            value, scale = quantize_weight(local_tensor(weights[name]).bfloat16()).forward
            if name not in self.values:
                self.values[name], self._scales[name] = value, scale
            self.values[name].copy_(value)
            self._scales[name].copy_(scale)

    def scales(self) -> Iterator[tuple[HfTensor, Box, Tensor]]:
        """Yield (scale tensor, this rank's box in it, scales of that box)."""
        weights = dict(self._network.named_parameters())
        for hf in filter(self.is_sent, hf_tensors(self._network)):
            held = local_box(weights[hf.parameter_name])
            if (common := intersection(held, hf.box)) is None:
                continue
            local = self._scales[hf.parameter_name][slices(in_blocks(relative(common, held)))]
            box, of = in_blocks(relative(common, hf.box)), scale_tensor(hf)
            yield (of, box, local) if hf.expert is None else (of, box[1:], local[0])

    def encoded(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, unsharded tensor). Replace each FP8 weight by its scales and FP8 values."""
        sent = {hf.name for hf in hf_tensors(self._network) if self.is_sent(hf)}
        for name, tensor in tensors:
            if name not in sent:
                yield name, tensor
                continue
            value, scale = quantize_weight(tensor.bfloat16()).forward
            yield name + SCALE, scale
            yield name, value


def scale_tensor(hf: HfTensor) -> HfTensor:
    shape = tuple(size // BLOCK for size in hf.shape)
    return replace(hf, name=hf.name + SCALE, shape=shape, dtype=torch.float32)
