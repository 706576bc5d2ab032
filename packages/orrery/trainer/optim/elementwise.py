"""Update rules that work value by value: AdamW, SGD with momentum and sign SGD.

AdamW and SGD call torch's fused kernels. These also divide the gradients.
"""

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from orrery.manifest.schema import AdamW, Sgd, SignSgd
from orrery.trainer.optim.optimizer import ParamGroup, WeightPart, split_by_decay


class AdamWRule:
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101)."""

    keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    counts_steps = True
    needs_whole_shards = False

    def __init__(self, spec: AdamW):
        self.spec = spec

    def update(
        self, parts: list[WeightPart], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        adamw(
            [part.weight for part in parts],
            [part.gradient for part in parts],
            [part.state["exp_avg"] for part in parts],
            [part.state["exp_avg_sq"] for part in parts],
            [],
            # Copies, because `adamw` increments them for each bucket that cuts the weight.
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


class SgdRule:
    """SGD with momentum. Weight decay is L2, added to the clipped gradient."""

    counts_steps = False
    needs_whole_shards = False

    def __init__(self, spec: Sgd):
        self.momentum = spec.momentum
        self.keys: tuple[str, ...] = ("momentum",) if spec.momentum else ()

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
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class SignSgdRule:
    """Sign SGD (Bernstein et al. 2018, arXiv 1802.04434): w ← w − lr · (sign(g) + decay · w).

    The divisor changes no sign.
    """

    keys: tuple[str, ...] = ()
    counts_steps = False
    needs_whole_shards = False

    def update(
        self, parts: list[WeightPart], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        weights = [part.weight for part in parts]
        if weight_decay:
            torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
        signs = torch._foreach_sign([part.gradient for part in parts])
        torch._foreach_add_(weights, signs, alpha=-lr)


def adamw_groups(spec: AdamW, weights: dict[str, nn.Parameter]) -> list[ParamGroup]:
    return split_by_decay(AdamWRule(spec), spec.lr, spec.weight_decay, weights)


def sgd_groups(spec: Sgd, weights: dict[str, nn.Parameter]) -> list[ParamGroup]:
    return split_by_decay(SgdRule(spec), spec.lr, spec.weight_decay, weights)


def sign_sgd_groups(spec: SignSgd, weights: dict[str, nn.Parameter]) -> list[ParamGroup]:
    return split_by_decay(SignSgdRule(), spec.lr, spec.weight_decay, weights)
