"""Weights in FP8, quantized once for all passes of a step.

A layer that `model.fp8` names has lists `<name>_fp8`: empty, or the weights as `kernels/fp8` takes
them. While a list is empty, each pass quantizes the weight that it finds.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from orrery.kernels.fp8.products import Parts, weight_parts
from orrery.models.layers import Attention, Experts, FeedForward


def products(network: nn.Module) -> Iterator[tuple[Parts, list[Tensor]]]:
    """Yield each product in FP8: its list, and the plain weights that share its input."""
    for module in network.modules():
        found: list[tuple[Parts | None, list[Tensor]]] = []
        if isinstance(module, Attention):
            qkv = [each.weight for each in (module.q_proj, module.k_proj, module.v_proj)]
            found = [(module.qkv_fp8, qkv), (module.o_fp8, [module.o_proj.weight])]
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
    """Quantize whole weights on one device before a forward pass, if they changed."""

    def __init__(self, network: nn.Module):
        self._network = network
        self._seen: dict[int, tuple[tuple[int, int], ...]] = {}

    @torch.no_grad()
    def refresh(self, *_: object) -> None:
        for index, (parts, weights) in enumerate(products(self._network)):
            seen = tuple((id(weight), weight._version) for weight in weights)
            if self._seen.get(index) != seen:
                parts[:] = []  # free the old ones first
                parts[:] = weight_parts(weights[0] if len(weights) == 1 else torch.cat(weights))
                self._seen[index] = seen
