"""Optimizers: the manifest's kinds behind one `Optimizer` (`optimizer.py`).

- A kind turns named weights into groups with an update rule. Norms and biases (fewer than two
  dimensions, or named so) never decay: decaying a gain fights its normalisation.
- Gradients are already summed over ranks (`parallel/fsdp.py`). `gradient.py` has their norm.
- Checkpoints use `named_state(optimizer, weights)`. Reading its tensors saves this rank's state,
  and filling them in place loads it. State exists, zeroed, from construction on.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from orrery.manifest import schema
from orrery.trainer.optim import elementwise, muon
from orrery.trainer.optim.gradient import clip, gradient_norm, last_not_finite
from orrery.trainer.optim.optimizer import Optimizer, ParamGroup, named_state

__all__ = [
    "KINDS",
    "Optimizer",
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


def make_optimizer(policy: nn.Module, spec: schema.Optimizer, offload: bool = False) -> Optimizer:
    """Return the manifest's optimizer over all trainable weights.

    With `offload`, its state is in host memory (`memory.optimizer_offload`).
    """
    weights = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    return Optimizer(KINDS[spec.kind](spec, weights), offload)
