"""Define update rules: their interface, AdamW, SGD and sign SGD."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from orrery.manifest.schema import AdamW, Sgd, SignSgd


@dataclass(frozen=True)
class WeightPart:
    """Flat slices of a weight, its gradient and state. With `needs_whole_shards`, whole shards."""

    source: nn.Parameter
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]


class UpdateRule:
    """`keys` names a rule's state tensors, each with the weight's shape.

    `counts_steps` adds `step`, a float32 scalar that counts earlier steps.
    """

    keys: tuple[str, ...] = ()
    counts_steps = False
    needs_whole_shards = False

    def __init__(self, spec: Any):
        self.spec = spec

    def update(
        self, parts: list[WeightPart], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        """Update weights in place with gradients / `divisor`. Gradients may be overwritten."""
        raise NotImplementedError


@dataclass
class ParamGroup:
    """Weights with a common update rule. `lr` is the peak learning rate."""

    weights: list[nn.Parameter]
    rule: UpdateRule
    lr: float
    weight_decay: float


def is_bias(name: str) -> bool:
    return name.endswith("bias")  # not by `ndim`, because stacked biases have 2


class AdamWRule(UpdateRule):
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101)."""

    keys = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def update(
        self, parts: list[WeightPart], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        adamw(
            [part.weight for part in parts],
            [part.gradient for part in parts],
            [part.state["exp_avg"] for part in parts],
            [part.state["exp_avg_sq"] for part in parts],
            [],
            # A copy, because a weight's parts share `step`, and `adamw` increments it.
            list(torch._foreach_add([part.state["step"] for part in parts], 0.0)),
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            beta1=self.spec.beta1,
            beta2=self.spec.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.spec.eps,
            maximize=False,
        )


class SgdRule(UpdateRule):
    """SGD. Weight decay is an L2 term, added to the clipped gradient."""

    def __init__(self, spec: Sgd):
        super().__init__(spec)
        self.keys = ("momentum",) if spec.momentum else ()

    def update(
        self, parts: list[WeightPart], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        sgd(
            [part.weight for part in parts],
            [part.gradient for part in parts],
            [part.state.get("momentum") for part in parts],
            fused=True,
            grad_scale=divisor,
            weight_decay=weight_decay,
            momentum=self.spec.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class SignSgdRule(UpdateRule):
    """Sign SGD (Bernstein et al. 2018, arXiv 1802.04434): w ← w − lr · (sign(g) + decay · w).

    `divisor` is ignored, because it does not change signs.
    """

    def update(
        self, parts: list[WeightPart], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        weights = [part.weight for part in parts]
        if weight_decay:
            torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
        signs = torch._foreach_sign([part.gradient for part in parts])
        torch._foreach_add_(weights, signs, alpha=-lr)


RULES: dict[str, Callable[[Any], UpdateRule]] = {
    "adamw": AdamWRule,
    "sgd": SgdRule,
    "sign_sgd": SignSgdRule,
}


def groups(spec: AdamW | Sgd | SignSgd, weights: dict[str, nn.Parameter]) -> list[ParamGroup]:
    rule = RULES[spec.kind](spec)
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in weights.items():
        (decayed if weight.ndim >= 2 and not is_bias(name) else others).append(weight)
    return [
        ParamGroup(decayed, rule, spec.lr, spec.weight_decay),
        ParamGroup(others, rule, spec.lr, 0.0),
    ]
