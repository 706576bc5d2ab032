"""Sign SGD (Bernstein et al. 2018, arXiv 1802.04434): w ← w − lr · (sign(g) + weight_decay · w). No state; clipping changes no sign."""

import torch
from torch import Tensor, nn

from orrery.manifest.schema import SignSgd
from orrery.trainer.optim.optimizer import Group, Piece, decayed_apart


class SignSgdRule:
    keys: tuple[str, ...] = ()
    counts = False
    whole = False

    def update(
        self, pieces: list[Piece], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        weights = [piece.weight for piece in pieces]
        if weight_decay:
            torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
        torch._foreach_add_(
            weights, torch._foreach_sign([piece.gradient for piece in pieces]), alpha=-lr
        )


def groups(spec: SignSgd, weights: dict[str, nn.Parameter]) -> list[Group]:
    return decayed_apart(SignSgdRule(), spec.lr, spec.weight_decay, weights)
