"""Mixture of experts: a float32 router, and stacked SwiGLU experts over rows sorted by expert.

T tokens · D hidden · E experts · K experts a token · M = T·K routed rows · I expert intermediate

Scores multiply the activation before the down projection, so the backward pass needs no expert's
output.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from orrery.kernels.expert_rows import (
    combine_rows,
    gather_rows,
    order_slots,
    sort_by_expert,
    swiglu_rows,
)
from orrery.kernels.grouped_matmul import adapted_grouped_matmul, grouped_matmul
from orrery.kernels.wide_linear import wide_linear
from orrery.manifest.schema import MoE
from orrery.models.layers import Adapter, FeedForward


class Router(nn.Module):
    """Choose each token's top K experts and score them.

    - Scores are probabilities, normalised to sum to one if `normalize_top_k`, times `scale`.
    - "softmax" is over all experts. "sigmoid" is per expert, with `expert_bias` in the choice alone
      (DeepSeek-V3, https://arxiv.org/abs/2412.19437, equation 16).
    - `expert_bias` [E] is a float32 buffer without gradient. bfloat16 would change choices.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        normalize_top_k: bool,
        kind: Literal["softmax", "sigmoid"] = "softmax",
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(Tensor(num_experts, hidden_size))
        bias = torch.zeros(num_experts, dtype=torch.float32) if kind == "sigmoid" else None
        self.register_buffer("expert_bias", bias)
        self.num_experts_per_token = num_experts_per_token
        self.normalize_top_k, self.scale = normalize_top_k, scale

    def forward(
        self, x_TD: Tensor, replayed_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return float32 scores [T, K], expert ids i64 [T, K] and the number of differing routes.

        Expert ids in `replayed_TK` replace the choice (router replay), with this router's scores
        and gradients. The number, i64 [], counts replayed ids that it did not choose, or is None.
        """
        logit_TE, epsilon = wide_linear(x_TD, self.weight), 0.0
        if self.expert_bias is None:
            probability_TE = logit_TE.softmax(dim=-1)
            choice_TE = probability_TE.detach()
        else:
            probability_TE, epsilon = logit_TE.sigmoid(), 1e-20
            choice_TE = probability_TE.detach() + self.expert_bias
        expert_TK, num_differing = choice_TE.topk(self.num_experts_per_token, dim=-1).indices, None
        if replayed_TK is not None:
            num_experts = probability_TE.shape[1]
            expert_TK, num_differing = _replay(replayed_TK.long(), expert_TK, num_experts)
        score_TK = probability_TE.gather(1, expert_TK)
        if self.normalize_top_k:
            score_TK = score_TK / (score_TK.sum(dim=-1, keepdim=True) + epsilon)
        return score_TK if self.scale == 1.0 else score_TK * self.scale, expert_TK, num_differing


def _replay(replayed_TK: Tensor, own_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    is_route_TK = (replayed_TK >= 0) & (replayed_TK < num_experts)
    is_own_TK = (replayed_TK.unsqueeze(2) == own_TK.unsqueeze(1)).any(dim=2)
    return torch.where(is_route_TK, replayed_TK, own_TK), (is_route_TK & ~is_own_TK).sum()


class Experts(nn.Module):
    """Stacked expert weights. `gate_up_proj` [E, 2·I, D] has an expert's gate rows first."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(Tensor(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(Tensor(num_experts, hidden_size, intermediate_size))
        self.gate_up_lora: Adapter | None = None  # set by `lora.adapt`
        self.down_lora: Adapter | None = None

    def forward(self, x_MD: Tensor, score_M: Tensor, ends_E: Tensor) -> Tensor:
        """Apply expert e to rows `ends[e − 1]:ends[e]` of x, times their score. `ends` is i32."""
        act_MI = swiglu_rows(_project(x_MD, self.gate_up_proj, self.gate_up_lora, ends_E), score_M)
        return _project(act_MI, self.down_proj, self.down_lora, ends_E)


def _project(x_MK: Tensor, weight_ENK: Tensor, adapter: Adapter | None, ends_E: Tensor) -> Tensor:
    if adapter is None:
        return grouped_matmul(x_MK, weight_ENK, ends_E)
    return adapted_grouped_matmul(x_MK, weight_ENK, *adapter.scaled(x_MK.dtype), ends_E)


class LocalExchange(nn.Module):
    """Keep tokens on one device. Expert parallelism replaces the module."""

    def forward(
        self, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, experts: Experts
    ) -> Tensor:
        rows = sort_by_expert(expert_TK, experts.down_proj.shape[0])
        out_MD = experts(gather_rows(x_TD, rows), order_slots(score_TK, rows), rows.ends_E)
        return combine_rows(out_MD, rows)


class MixtureOfExperts(nn.Module):
    """Routed experts plus shared experts, fused into one feed-forward."""

    def __init__(self, hidden_size: int, moe: MoE) -> None:
        super().__init__()
        sizes = (hidden_size, moe.num_experts, moe.num_experts_per_token)
        self.gate = Router(*sizes, moe.normalize_top_k, moe.score, moe.routed_scale)
        self.experts = Experts(moe.num_experts, hidden_size, moe.expert_intermediate_size)
        self.exchange: nn.Module = LocalExchange()
        shared = moe.num_shared_experts * moe.expert_intermediate_size
        self.shared_experts = FeedForward(hidden_size, shared) if shared else None

    def forward(
        self, x_TD: Tensor, replayed_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [T, D] and the number of differing routes."""
        score_TK, expert_TK, num_differing = self.gate(x_TD, replayed_TK)
        out_TD = self.exchange(x_TD, score_TK, expert_TK, self.experts)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(x_TD)
        return out_TD, num_differing
