"""Optimizers: the manifest's kinds behind one `BucketedOptimizer`.

Norms and biases never decay, because decaying a gain fights its normalisation. Checkpoints use
`named_state`.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from orrery.manifest import schema
from orrery.trainer.optim import elementwise, muon
from orrery.trainer.optim.gradient import clip, gradient_norm, last_not_finite
from orrery.trainer.optim.optimizer import BucketedOptimizer, ParamGroup, named_state

__all__ = [
    "KINDS",
    "BucketedOptimizer",
    "clip",
    "gradient_norm",
    "last_not_finite",
    "make_optimizer",
    "named_state",
]

KINDS: dict[str, Callable[[Any, dict[str, nn.Parameter]], list[ParamGroup]]] = {
    "adamw": elementwise.adamw_groups,
    "muon": muon.groups,
    "sgd": elementwise.sgd_groups,
    "sign_sgd": elementwise.sign_sgd_groups,
}


def make_optimizer(
    policy: nn.Module, spec: schema.Optimizer, offload: bool = False
) -> BucketedOptimizer:
    """Return the manifest's optimizer over trainable weights. `offload`: state on the host."""
    weights = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    return BucketedOptimizer(KINDS[spec.kind](spec, weights), offload)
