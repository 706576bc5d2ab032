"""Stochastic gradient descent with momentum: torch's fused kernel. Weight decay is L2: it joins the clipped gradient, before momentum."""

from torch import Tensor, nn
from torch.optim.sgd import sgd

from orrery.manifest.schema import Sgd
from orrery.trainer.optim.optimizer import Group, Piece, decayed_apart


class SgdRule:
    counts = False
    whole = False

    def __init__(self, spec: Sgd):
        self.momentum = spec.momentum
        self.keys: tuple[str, ...] = ("momentum",) if spec.momentum else ()

    def update(
        self, pieces: list[Piece], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        sgd(
            [piece.weight for piece in pieces],
            [piece.gradient for piece in pieces],
            [piece.state.get("momentum") for piece in pieces],
            fused=True,
            grad_scale=divisor,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def groups(spec: Sgd, weights: dict[str, nn.Parameter]) -> list[Group]:
    return decayed_apart(SgdRule(spec), spec.lr, spec.weight_decay, weights)
