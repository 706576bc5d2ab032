"""LoRA (https://arxiv.org/abs/2106.09685): W + alpha / rank · B A.

Merging computes in float32 and rounds once. A is drawn uniformly from ±1/√(inputs), seeded by
run seed and adapter name. B starts at zero.
"""

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orrery.manifest.schema import Lora
from orrery.models.causal_lm import CausalLm
from orrery.models.layers import Adapter, Experts, FeedForward
from orrery.models.placement import Box, full_tensor, local_box, local_tensor, slices


class AdaptedLinear(nn.Linear):
    def __init__(self, linear: nn.Linear, lora: Lora, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.lora = Adapter(linear.weight, lora, dtype)
        self.product: Callable[..., Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias) + self.lora(x)


def adapt(module: CausalLm, lora: Lora, dtype: torch.dtype) -> None:
    """Freeze all weights, and add uninitialised adapters to layers in `lora.targets`."""
    module.requires_grad_(False)
    for layer in module.layers:
        for owner in list(layer.modules()):
            if isinstance(owner, Experts):
                if "experts" in lora.targets:
                    owner.gate_up_lora = Adapter(owner.gate_up_proj, lora, dtype)
                    owner.down_lora = Adapter(owner.down_proj, lora, dtype)
                continue
            target = "feed_forward" if isinstance(owner, FeedForward) else "attention"
            if target in lora.targets:
                for name, child in list(owner.named_children()):
                    if type(child) is nn.Linear:
                        setattr(owner, name, AdaptedLinear(child, lora, dtype))


def adapters(module: nn.Module) -> Iterator[tuple[str, Adapter]]:
    for name, owner in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(owner, AdaptedLinear):
            yield f"{prefix}weight", owner.lora
        elif isinstance(owner, Experts) and owner.gate_up_lora and owner.down_lora:
            yield f"{prefix}gate_up_proj", owner.gate_up_lora
            yield f"{prefix}down_proj", owner.down_lora


@torch.no_grad()
def initialize(module: nn.Module, seed: int) -> None:
    for name, adapter in adapters(module):
        local_tensor(adapter.b).zero_()
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        bound = 1 / math.sqrt(adapter.a.shape[-1])
        whole = torch.empty(adapter.a.shape).uniform_(-bound, bound, generator=generator)
        local_tensor(adapter.a).copy_(whole[slices(local_box(adapter.a))])


@torch.no_grad()
def merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """Return the unsharded `weight` merged with `adapter`. A collective if `adapter` is sharded."""
    a, b = full_tensor(adapter.a.detach()).float(), full_tensor(adapter.b.detach()).float()
    return (weight.float() + adapter.scale * (b @ a)).to(weight.dtype)


@torch.no_grad()
def merged_shard(weight: Tensor, adapter: Adapter) -> Tensor:
    """Return this rank's shard of `weight` merged with its adapter.

    A collective if the adapter's shards do not match the weight's.
    """
    *stack, rows, columns = local_box(weight)
    rank, local = (0, adapter.a.shape[-2]), local_tensor(weight.detach())
    device = weight.device
    if isinstance(weight, DTensor):
        device = torch.device(weight.device_mesh.device_type)
    a = _matching_part(weight, adapter.a, weight.dim() - 2, (*stack, rank, columns))
    b = _matching_part(weight, adapter.b, weight.dim() - 1, (*stack, rows, rank))
    update = adapter.scale * (b.to(device).float() @ a.to(device).float())
    return (local.to(device).float() + update).to(weight.dtype).to(local.device)


def _matching_part(weight: Tensor, factor: Tensor, rank_dim: int, box: Box) -> Tensor:
    """Return part `box` of an adapter's factor A or B.

    Gather the factor if its shards differ from `box`. All ranks decide alike, by placements.
    """
    factor = factor.detach()
    if not (isinstance(factor, DTensor) and isinstance(weight, DTensor)):
        return full_tensor(factor)[slices(box)]
    splits_rank = any(
        getattr(placement, "dim", None) == rank_dim for placement in factor.placements
    )
    if factor.placements == weight.placements and not splits_rank:
        return local_tensor(factor)
    return full_tensor(factor)[slices(box)]
