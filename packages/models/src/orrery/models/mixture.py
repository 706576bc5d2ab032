"""Mixture of experts: a softmax router in float32 and stacked SwiGLU experts over tokens sorted by expert.

T tokens · D hidden · E experts · K experts a token · M = T·K routed rows · I expert intermediate
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orrery.kernels.grouped_matmul import grouped_matmul


class Router(nn.Module):
    """Scores of the chosen experts: a softmax over all experts, then the top K, normalised to sum to one if asked."""

    def __init__(self, hidden_size: int, num_experts: int, num_experts_per_token: int, normalize_top_k: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(Tensor(num_experts, hidden_size))
        self.num_experts_per_token, self.normalize_top_k = num_experts_per_token, normalize_top_k

    def forward(self, x_TD: Tensor, routed_experts_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """float32 scores [T, K] and expert ids i64 [T, K]; with `routed_experts_TK` given, own scores at those ids (router replay)."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        probability_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype)).softmax(dim=-1)
        if routed_experts_TK is None:
            routed_experts_TK = probability_TE.detach().topk(self.num_experts_per_token, dim=-1).indices
        score_TK = probability_TE.gather(1, routed_experts_TK)
        if self.normalize_top_k:
            score_TK = score_TK / score_TK.sum(dim=-1, keepdim=True)
        return score_TK, routed_experts_TK


class Experts(nn.Module):
    """Stacked expert weights; rows arrive sorted by expert."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(Tensor(num_experts, intermediate_size, hidden_size))
        self.up_proj = nn.Parameter(Tensor(num_experts, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(Tensor(num_experts, hidden_size, intermediate_size))

    def forward(self, x_MD: Tensor, ends_E: Tensor) -> Tensor:
        """Rows `ends[e − 1]:ends[e]` of x go through expert e; ends i32 [E]."""
        inner_MI = F.silu(grouped_matmul(x_MD, self.gate_proj, ends_E)) * grouped_matmul(x_MD, self.up_proj, ends_E)
        return grouped_matmul(inner_MI, self.down_proj, ends_E)


class MixtureOfExperts(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_token: int,
        normalize_top_k: bool,
    ) -> None:
        super().__init__()
        self.gate = Router(hidden_size, num_experts, num_experts_per_token, normalize_top_k)
        self.experts = Experts(num_experts, hidden_size, intermediate_size)
        self.num_experts = num_experts

    def forward(self, x_TD: Tensor, routed_experts_TK: Tensor | None = None) -> Tensor:
        score_TK, expert_TK = self.gate(x_TD, routed_experts_TK)
        row_M = expert_TK.flatten().argsort(stable=True)
        ends_E = torch.bincount(expert_TK.flatten(), minlength=self.num_experts).cumsum(0).to(torch.int32)
        out_MD = self.experts(x_TD[row_M // expert_TK.shape[1]], ends_E)
        # Back in token order, weighed in float32 and summed over K in a fixed order: no atomics, the same bits every time.
        out_TKD = out_MD[row_M.argsort()].unflatten(0, expert_TK.shape)
        return torch.einsum("tkd,tk->td", out_TKD.to(score_TK.dtype), score_TK).to(x_TD.dtype)
