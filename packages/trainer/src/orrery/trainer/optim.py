"""The optimizer and what stands between gradients and it: global norm, clipping, and naming what is not finite.

- AdamW is torch's, fused (one pass over memory; on CPU and CUDA). `weight_decay` acts on matrices; norms and biases (fewer than two
  dimensions) have none, since decaying a gain towards zero fights the normalisation it belongs to.
- Gradients are summed over ranks before they get here (`parallel/fsdp.py`); the norm is of the whole gradient, each shard counted once.
- Under FSDP the local shards are read through `local`, so no gradient is ever gathered.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from orrery.manifest.schema import AdamW
from orrery.trainer.parallel.world import World


def make_optimizer(policy: nn.Module, spec: AdamW) -> torch.optim.Optimizer:
    """AdamW over all trainable weights, in the order of `named_parameters`."""
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_norm(weights: Iterable[nn.Parameter], world: World) -> torch.Tensor:
    """L2 norm of the whole gradient, float32 scalar, the same on every rank."""
    norms = [torch.linalg.vector_norm(local(weight.grad), dtype=torch.float32) for weight in weights if weight.grad is not None]
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=world.device)
    return world.sum_over_shards(square).sqrt()


def clip(weights: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients so that their norm is at most `max_norm`; decided on the device, without a sync."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for weight in weights:
        if weight.grad is not None:
            local(weight.grad).mul_(scale)


def first_not_finite(tensors: Iterable[torch.Tensor | None]) -> int:
    """Position of the first tensor with a NaN or an infinity in this rank's part, or −1."""
    return next((i for i, tensor in enumerate(tensors) if tensor is not None and not torch.isfinite(local(tensor)).all()), -1)
