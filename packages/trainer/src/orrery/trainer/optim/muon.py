"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): the blocks' matrices move along their orthogonalised momentum.

    m ← momentum · m + (1 − momentum) · g;   u = m, or with Nesterov's look-ahead momentum · m + (1 − momentum) · g
    w ← (1 − lr · weight_decay) · w − lr · 0.2 · √max(rows, columns) · orthogonal(u)

- The factor gives updates the root mean square of AdamW's (Liu et al. 2025, arXiv 2502.16982, equation 4).
- `orthogonal` wants whole matrices: `whole_matrices.py` brings shards together. Its input is in bfloat16 on CUDA, float32 on CPU.
- A stack of experts is a matrix an expert, and a fused `gate_up_proj` is two: gate and up, one above the other. So is `b` of its adapter,
  whose rows are those of the weight; its `a` is one. Stacks of transformers' networks (`body`) are a matrix an expert always: gate and up
  are side by side there, or take turns.
- Embedding, LM head, routers, norms, biases and convolutions are `rest`'s, an AdamW. What is a matrix of a block is told by its name.
- Every rank that shares a weight must have a gradient of it, or none: they meet in collectives.
"""

import math
import re

import torch
from torch import Tensor, nn

from orrery.manifest.schema import Muon
from orrery.trainer.optim import adamw
from orrery.trainer.optim.optimizer import Group, Piece, is_bias
from orrery.trainer.optim.whole_matrices import Matrices, orthogonalize

RMS = 0.2
FUSED = re.compile(
    r"\.gate_up_proj\.weight$|^(?!.*\bbody\.).*\.gate_up_(proj|lora\.b)$"
)  # the latter: stacked experts, their adapter
NO_MATRICES = (
    "gate",
    "router",
    "conv",
    "conv1d",
    "conv_1d",
    "A_log",
)  # the last: a row of rates for each channel of Mamba


class MuonRule:
    keys: tuple[str, ...] = ("momentum",)
    counts = False
    whole = True

    def __init__(self, spec: Muon, fused: set[nn.Parameter]):
        """`fused`: the weights that hold two matrices, one above the other."""
        self.spec, self.fused = spec, fused

    def update(
        self, pieces: list[Piece], lr: float, weight_decay: float, divisor: Tensor | None
    ) -> None:
        directions = self._directions([piece for piece in pieces if piece.weight.numel()], divisor)
        matrices = [
            Matrices(
                piece.source,
                directions.get(piece.source, piece.gradient),
                2 if piece.source in self.fused else 1,
            )
            for piece in pieces
        ]
        updates = orthogonalize(matrices, self.spec.num_newton_schulz_steps)
        for piece, one, update in zip(pieces, matrices, updates, strict=True):
            piece.weight.mul_(1.0 - lr * weight_decay)
            piece.weight.add_(update, alpha=-lr * RMS * math.sqrt(max(one.rows, one.columns)))

    def _directions(
        self, pieces: list[Piece], divisor: Tensor | None
    ) -> dict[nn.Parameter, Tensor]:
        if not pieces:
            return {}
        gradients, momenta = (
            [piece.gradient for piece in pieces],
            [piece.state["momentum"] for piece in pieces],
        )
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)
        torch._foreach_lerp_(momenta, gradients, 1.0 - self.spec.momentum)
        if self.spec.nesterov:
            torch._foreach_lerp_(gradients, momenta, self.spec.momentum)
        return dict(
            zip(
                [piece.source for piece in pieces],
                gradients if self.spec.nesterov else momenta,
                strict=True,
            )
        )


def is_block_matrix(name: str, weight: Tensor) -> bool:
    """Whether `name` is a matrix (or a stack) inside one of a list of blocks, and none of `NO_MATRICES` or of stacked biases."""
    owner = name.removesuffix(".weight").rpartition(".")[2]
    inside = re.search(r"\.\d+\.", name) is not None
    return weight.ndim in (2, 3) and inside and owner not in NO_MATRICES and not is_bias(name)


def groups(spec: Muon, weights: dict[str, nn.Parameter]) -> list[Group]:
    matrices = {name: weight for name, weight in weights.items() if is_block_matrix(name, weight)}
    fused = {weight for name, weight in matrices.items() if FUSED.search(name)}
    rest = {name: weight for name, weight in weights.items() if name not in matrices}
    return [
        Group(list(matrices.values()), MuonRule(spec, fused), spec.lr, spec.weight_decay),
        *adamw.groups(spec.rest, rest),
    ]
