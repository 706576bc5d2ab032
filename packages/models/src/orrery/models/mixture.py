"""Mixture of experts: a router in float32, and stacked SwiGLU experts over rows sorted by expert.

T tokens · D hidden · E experts · K experts a token · M = T·K routed rows · I expert intermediate

- Parallelism from outside replaces `MixtureOfExperts.exchange` and shards the parameters of `experts` on dimension 0; the rest is local.
- A score multiplies the activation before the down projection, so the backward pass needs no output of an expert.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from orrery.kernels.expert_rows import combine_rows, gather_rows, order_slots, plan, swiglu_rows
from orrery.kernels.grouped_matmul import adapted_grouped_matmul, grouped_matmul
from orrery.kernels.wide_linear import wide_linear
from orrery.manifest.schema import MoE
from orrery.models.adapter import Adapter
from orrery.models.feed_forward import FeedForward


class Router(nn.Module):
    """Scores of the chosen experts: a probability an expert, the top K of them, normalised to sum to one if asked, times `scale`.

    - "softmax" is over all experts. "sigmoid" is of each by itself; then `expert_bias` takes part in the choice and not in the score
      (DeepSeek-V3, https://arxiv.org/abs/2412.19437, equation 16).
    - `expert_bias` [E] is a float32 buffer: no gradient reaches it, and bfloat16 would change choices.
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
        self.register_buffer(
            "expert_bias",
            torch.zeros(num_experts, dtype=torch.float32) if kind == "sigmoid" else None,
        )
        self.num_experts_per_token, self.normalize_top_k, self.scale = (
            num_experts_per_token,
            normalize_top_k,
            scale,
        )

    def forward(
        self, x_TD: Tensor, replayed_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """float32 scores [T, K] and expert ids i64 [T, K].

        With `replayed_TK`, integers, own scores at those ids (router replay), so that gradients reach the router through them; where they
        are no ids of experts, own choice. Third is then how many of the replayed ids own choice does not have, i64 [], else None.
        """
        logit_TE = wide_linear(x_TD, self.weight)
        probability_TE = (
            logit_TE.softmax(dim=-1) if self.expert_bias is None else logit_TE.sigmoid()
        )
        choice_TE = (
            probability_TE.detach()
            if self.expert_bias is None
            else probability_TE.detach() + self.expert_bias
        )
        expert_TK = choice_TE.topk(self.num_experts_per_token, dim=-1).indices
        num_differing = None
        if replayed_TK is not None:
            expert_TK, num_differing = _replay(
                replayed_TK.long(), expert_TK, probability_TE.shape[1]
            )
        score_TK = probability_TE.gather(1, expert_TK)
        if self.normalize_top_k:
            score_TK = score_TK / (
                score_TK.sum(dim=-1, keepdim=True) + (0.0 if self.expert_bias is None else 1e-20)
            )
        return score_TK if self.scale == 1.0 else score_TK * self.scale, expert_TK, num_differing


def _replay(replayed_TK: Tensor, own_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    is_route_TK = (replayed_TK >= 0) & (replayed_TK < num_experts)
    is_own_TK = (replayed_TK.unsqueeze(2) == own_TK.unsqueeze(1)).any(dim=2)
    return torch.where(is_route_TK, replayed_TK, own_TK), (is_route_TK & ~is_own_TK).sum()


class Experts(nn.Module):
    """Stacked expert weights; in `gate_up_proj` [E, 2·I, D] an expert's gate rows stand before its up rows."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(Tensor(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(Tensor(num_experts, hidden_size, intermediate_size))
        self.gate_up_lora: Adapter | None = None  # `lora.adapt` puts adapters here
        self.down_lora: Adapter | None = None

    def forward(self, x_MD: Tensor, score_M: Tensor, ends_E: Tensor) -> Tensor:
        """Rows `ends[e − 1]:ends[e]` of x go through expert e, times their score; ends i32 [E], E as many as there are here."""
        act_MI = swiglu_rows(_project(x_MD, self.gate_up_proj, self.gate_up_lora, ends_E), score_M)
        return _project(act_MI, self.down_proj, self.down_lora, ends_E)


def _project(x_MK: Tensor, weight_ENK: Tensor, adapter: Adapter | None, ends_E: Tensor) -> Tensor:
    if adapter is None:
        return grouped_matmul(x_MK, weight_ENK, ends_E)
    return adapted_grouped_matmul(x_MK, weight_ENK, *adapter.scaled(x_MK.dtype), ends_E)


class LocalExchange(nn.Module):
    """Tokens to their experts and back where every expert is here."""

    def forward(
        self, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, experts: Experts
    ) -> Tensor:
        rows = plan(expert_TK, experts.down_proj.shape[0])
        out_MD = experts(gather_rows(x_TD, rows), order_slots(score_TK, rows), rows.ends_E)
        return combine_rows(out_MD, rows)


class MixtureOfExperts(nn.Module):
    """The routed experts' scored sum, and beside it the shared experts, which are one feed-forward of their joint width."""

    def __init__(self, hidden_size: int, moe: MoE) -> None:
        super().__init__()
        self.gate = Router(
            hidden_size,
            moe.num_experts,
            moe.num_experts_per_token,
            moe.normalize_top_k,
            kind=moe.score,
            scale=moe.routed_scale,
        )
        self.experts = Experts(moe.num_experts, hidden_size, moe.expert_intermediate_size)
        self.exchange: nn.Module = LocalExchange()
        shared = moe.num_shared_experts * moe.expert_intermediate_size
        self.shared_experts = FeedForward(hidden_size, shared) if shared else None

    def forward(
        self, x_TD: Tensor, replayed_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The sum, and the router's count of replayed choices that differ from its own."""
        score_TK, expert_TK, num_differing = self.gate(x_TD, replayed_TK)
        out_TD = self.exchange(x_TD, score_TK, expert_TK, self.experts)
        return out_TD if self.shared_experts is None else out_TD + self.shared_experts(
            x_TD
        ), num_differing
