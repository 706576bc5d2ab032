"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): W + alpha / rank · B A beside frozen weights.

- An adapter is a module `lora` of the projection that it adapts; of stacked experts, a pair an expert.
- Checkpoint names of weights stay, and adapters have none: what leaves the trainer is merged (`hf_tensors.named_hf_tensors`, and of one
  rank's shards `merged_shard`), in float32 and rounded once to the weight's dtype.
- A is drawn uniformly from ±1/√(inputs), B is zero: the adapted network begins as the one it adapts.
- An adapter's numbers depend on the seed and its name only: not on ranks or sharding.
"""

import hashlib
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orrery.manifest.schema import Lora
from orrery.models.adapter import Adapter
from orrery.models.causal_lm import CausalLm
from orrery.models.feed_forward import FeedForward
from orrery.models.mixture import Experts
from orrery.models.placement import Box, full_tensor, local_box, local_tensor, slices


class AdaptedLinear(nn.Linear):
    """A projection with its adapter; weight and bias are those of the projection that it replaces."""

    def __init__(self, linear: nn.Linear, lora: Lora, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.lora = Adapter(linear.weight, lora, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.lora(x)


def adapt(module: CausalLm, lora: Lora, dtype: torch.dtype) -> None:
    """Freeze the module's weights and put adapters, in `dtype`, beside those that `lora.targets` names.

    They are unset: call `initialize` once the module has storage.
    """
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
    """(name of the adapted parameter, its adapter), in the order of the module's own."""
    for name, owner in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(owner, AdaptedLinear):
            yield f"{prefix}weight", owner.lora
        elif (
            isinstance(owner, Experts)
            and owner.gate_up_lora is not None
            and owner.down_lora is not None
        ):
            yield f"{prefix}gate_up_proj", owner.gate_up_lora
            yield f"{prefix}down_proj", owner.down_lora


@torch.no_grad()
def initialize(module: nn.Module, seed: int) -> None:
    """Fill every adapter's shards; each rank draws a whole adapter at a time and keeps its part."""
    for name, adapter in adapters(module):
        local_tensor(adapter.b).zero_()
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        bound = 1 / math.sqrt(adapter.a.shape[-1])
        whole = torch.empty(adapter.a.shape).uniform_(-bound, bound, generator=generator)
        local_tensor(adapter.a).copy_(whole[slices(local_box(adapter.a))])


@torch.no_grad()
def merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """The whole `weight` with the adapter's part in it: a collective where the adapter is sharded."""
    a, b = full_tensor(adapter.a.detach()).float(), full_tensor(adapter.b.detach()).float()
    return (weight.float() + adapter.scale * (b @ a)).to(weight.dtype)


@torch.no_grad()
def merged_shard(weight: Tensor, adapter: Adapter) -> Tensor:
    """This rank's shard of `weight` with the adapter's part in it: a collective, but where the adapter is cut as the weight is.

    Where shards are in host memory it is computed on the mesh's device, and comes back.
    """
    *stack, rows, columns = local_box(weight)
    rank, local = (0, adapter.a.shape[-2]), local_tensor(weight.detach())
    device = (
        torch.device(weight.device_mesh.device_type)
        if isinstance(weight, DTensor)
        else weight.device
    )
    a = _beside(weight, adapter.a, weight.dim() - 2, (*stack, rank, columns)).to(device).float()
    b = _beside(weight, adapter.b, weight.dim() - 1, (*stack, rows, rank)).to(device).float()
    return (local.to(device).float() + adapter.scale * (b @ a)).to(weight.dtype).to(local.device)


def _beside(weight: Tensor, factor: Tensor, rank_dim: int, box: Box) -> Tensor:
    """The box of an adapter's factor that goes with this rank's shard of the weight; but for `rank_dim` their sizes are the same.

    Every rank goes the same way: what decides are placements, not what this rank holds.
    """
    factor = factor.detach()
    is_cut_alike = (
        isinstance(factor, DTensor)
        and isinstance(weight, DTensor)
        and factor.placements == weight.placements
    )
    if is_cut_alike and all(
        getattr(placement, "dim", None) != rank_dim for placement in factor.placements
    ):
        return local_tensor(factor)
    return full_tensor(factor)[slices(box)]
