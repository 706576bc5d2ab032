"""Build the manifest's optimizer.

Norms and biases have no weight decay, because it would shrink the norms' gains.
"""

from torch import nn

from orrery.manifest import schema
from orrery.trainer.optim import muon, rules
from orrery.trainer.optim.gradient import clip, gradient_norm, last_not_finite
from orrery.trainer.optim.optimizer import BucketedOptimizer, named_state

__all__ = [
    "BucketedOptimizer",
    "clip",
    "gradient_norm",
    "last_not_finite",
    "make_optimizer",
    "named_state",
]


def make_optimizer(
    policy: nn.Module, spec: schema.Optimizer, offload: bool = False, resident: float = 0.0
) -> BucketedOptimizer:
    weights = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    if isinstance(spec, schema.Muon):
        return BucketedOptimizer(muon.groups(spec, policy, weights), offload)
    return BucketedOptimizer(rules.groups(spec, weights), offload, resident=resident)
