"""Optimizers: closed kinds of the manifest, one file each, behind one `Optimizer` (`optimizer.py`).

- A kind turns named weights into groups with a rule. `weight_decay` acts on matrices; norms and biases (fewer than two dimensions, or
  named so) have none, since decaying a gain towards zero fights the normalisation it belongs to.
- Gradients are summed over ranks before they get here (`parallel/fsdp.py`); `gradient.py` has their norm and `clip`.
- For checkpoints: `named_state(optimizer, weights)` yields `(key, weight name, local tensor, box)` for all state of this rank, to be read
  or, for loading, filled in place. State exists from construction on, zeroed, so nothing needs to be made before loading. Tensors are plain
  (never DTensor) and may be on the CPU; a scalar (`step`) has the box () and is the same on all ranks.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from orrery.manifest import schema
from orrery.trainer.optim import adamw, muon, sgd, sign_sgd
from orrery.trainer.optim.gradient import clip, gradient_norm, last_not_finite
from orrery.trainer.optim.optimizer import Group, Optimizer, named_state

__all__ = [
    "KINDS",
    "Optimizer",
    "clip",
    "gradient_norm",
    "last_not_finite",
    "make_optimizer",
    "named_state",
]

KINDS: dict[str, Callable[[Any, dict[str, nn.Parameter]], list[Group]]] = {
    "adamw": adamw.groups,
    "muon": muon.groups,
    "sgd": sgd.groups,
    "sign_sgd": sign_sgd.groups,
}


def make_optimizer(policy: nn.Module, spec: schema.Optimizer, offload: bool = False) -> Optimizer:
    """The manifest's optimizer over all trainable weights; with `offload`, state waits in host memory (`memory.optimizer_offload`)."""
    weights = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    return Optimizer(KINDS[spec.kind](spec, weights), offload)
