"""AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101): torch's fused kernel, one pass over memory, on CPU and CUDA.

Clipping rides along: the kernel divides gradients as it reads them.
"""

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from orrery.manifest.schema import AdamW
from orrery.trainer.optim.optimizer import Group, Piece, decayed_apart


class AdamWRule:
    keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    counts = True
    whole = False

    def __init__(self, spec: AdamW):
        self.spec = spec

    def update(
        self, pieces: list[Piece], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        adamw(
            [piece.weight for piece in pieces],
            [piece.gradient for piece in pieces],
            [piece.state["exp_avg"] for piece in pieces],
            [piece.state["exp_avg_sq"] for piece in pieces],
            [],
            # Copies: the function counts the step, and a weight that several buckets cut would be counted several times.
            list(torch._foreach_add([piece.state["step"] for piece in pieces], 0.0)),
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


def groups(spec: AdamW, weights: dict[str, nn.Parameter]) -> list[Group]:
    return decayed_apart(AdamWRule(spec), spec.lr, spec.weight_decay, weights)
