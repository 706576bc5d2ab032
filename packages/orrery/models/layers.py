"""Layers of pre-norm transformers: attention, feed-forward, and mixtures of experts.

Shapes: T tokens, D hidden, H query heads, G key and value heads, K head size, R rotated width. In
mixtures of experts: E experts, K experts per token, M = T·K rows, I intermediate size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orrery.kernels.attention import Documents, varlen_attention
from orrery.kernels.expert_rows import (
    RowOrder,
    combine_rows,
    gather_rows,
    order_slots,
    sort_by_expert,
    swiglu_rows,
    wide_linear,
)
from orrery.kernels.fp8.products import Parts, fp8_experts, fp8_linear
from orrery.kernels.fp8.quantize import BLOCK
from orrery.kernels.grouped_matmul import adapted_grouped_matmul, grouped_matmul
from orrery.manifest.schema import Llama3RopeScaling, Lora, Model, MoE, RopeScaling, YarnRopeScaling


def project(x_TD: Tensor, fp8: Parts | None, *linears: nn.Linear) -> list[Tensor]:
    """Return each linear layer's output, computed in FP8 unless `fp8` is None.

    `fp8` holds the quantized weights. If it is empty, quantize them.
    """
    if fp8 is None:
        return [linear(x_TD) for linear in linears]
    outputs = fp8_linear(x_TD, [linear.weight for linear in linears], fp8)
    biases = [linear.bias for linear in linears]
    return [y if bias is None else y + bias for y, bias in zip(outputs, biases, strict=True)]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate x) · up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, is_fp8: bool = False) -> None:
        super().__init__()
        self.gate_up_fp8: Parts | None = [] if is_fp8 else None
        self.down_fp8: Parts | None = [] if is_fp8 else None
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate, up = project(x_TD, self.gate_up_fp8, self.gate_proj, self.up_proj)
        return project(F.silu(gate) * up, self.down_fp8, self.down_proj)[0]


class Adapter(nn.Module):
    """LoRA factors `a` [..., rank, in] and `b` [..., out, rank] of one weight [..., out, in]."""

    def __init__(self, weight: Tensor, lora: Lora, dtype: torch.dtype) -> None:
        super().__init__()
        *stack, num_outputs, num_inputs = weight.shape
        options = {"dtype": dtype, "device": weight.device}
        self.a = nn.Parameter(torch.empty(*stack, lora.rank, num_inputs, **options))
        self.b = nn.Parameter(torch.empty(*stack, num_outputs, lora.rank, **options))
        self.scale = lora.alpha / lora.rank

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.scaled(x.dtype)
        return F.linear(F.linear(x, a), b)

    def scaled(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.a.to(dtype), (self.b * self.scale).to(dtype)


def rotary_angles(
    positions_T: Tensor,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, 1, R] of rotary angles, position · theta^(−2i/R) (RoFormer).

    Columns i and i + R/2 are equal, as in GPT-NeoX. Angles are computed in float32.
    """
    index = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=positions_T.device)
    frequency, size = 1.0 / theta ** (index.float() / rotary_dim), 1.0
    if isinstance(scaling, Llama3RopeScaling):
        frequency = _scale_frequencies(frequency, scaling)
    elif scaling is not None:
        frequency = _interpolate(frequency, theta, scaling)
        size = yarn_scale(scaling, scaling.angle_scale) / yarn_scale(scaling, scaling.score_scale)
    angle_TR = positions_T.float()[:, None] * frequency
    angle_TR = torch.cat((angle_TR, angle_TR), dim=-1)[:, None]
    return (angle_TR.cos() * size).to(dtype), (angle_TR.sin() * size).to(dtype)


def yarn_scale(scaling: YarnRopeScaling, scale: float) -> float:
    return 0.1 * scale * math.log(scaling.factor) + 1.0


def _interpolate(frequency: Tensor, theta: float, scaling: YarnRopeScaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high frequencies, interpolate in between (YaRN)."""
    half = frequency.shape[0]

    def index(turns: float) -> float:
        wavelengths = scaling.original_max_positions / (turns * 2 * math.pi)
        return half * math.log(wavelengths) / math.log(theta)

    low = max(math.floor(index(scaling.fast_turns)), 0)
    high = min(math.ceil(index(scaling.slow_turns)), 2 * half - 1)
    at = torch.arange(half, dtype=torch.float32, device=frequency.device)
    divided = ((at - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequency * (1 - divided) + frequency / scaling.factor * divided


def _scale_frequencies(frequency: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def apply_rotary(x_THK: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    rotary_dim = cos_T1R.shape[-1]
    if rotary_dim < x_THK.shape[-1]:
        rotated_THR = apply_rotary(x_THK[..., :rotary_dim], cos_T1R, sin_T1R)
        return torch.cat((rotated_THR, x_THK[..., rotary_dim:]), dim=-1)
    first, second = x_THK.chunk(2, dim=-1)
    return x_THK * cos_T1R + torch.cat((-second, first), dim=-1) * sin_T1R


class LocalCore(nn.Module):
    """Attention on one rank. Context parallelism replaces this module."""

    def forward(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: Documents) -> Tensor:
        return varlen_attention(q_THK, k_TGK, v_TGK, documents)


class Attention(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        hidden_size, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, config.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, config.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, config.num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.core: nn.Module = LocalCore()
        is_fp8 = "attention" in (config.fp8 or ())
        self.qkv_fp8: Parts | None = [] if is_fp8 else None
        self.o_fp8: Parts | None = [] if is_fp8 else None

    def forward(self, x_TD: Tensor, angles: Sequence[Tensor], documents: Documents) -> Tensor:
        out_TD = self.core(*self.project_heads(x_TD, angles), documents).flatten(1)
        return project(out_TD, self.o_fp8, self.o_proj)[0]

    def project_heads(
        self, x_TD: Tensor, angles: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q [T, H, K] and k [T, G, K], and v [T, G, K]."""
        q, k, v = project(x_TD, self.qkv_fp8, self.q_proj, self.k_proj, self.v_proj)
        q_THK = self.q_norm(q.unflatten(-1, (-1, self.head_dim)))
        k_TGK = self.k_norm(k.unflatten(-1, (-1, self.head_dim)))
        v_TGK = v.unflatten(-1, (-1, self.head_dim))
        return apply_rotary(q_THK, *angles), apply_rotary(k_TGK, *angles), v_TGK


class Router(nn.Module):
    """Choose and score each token's top K experts.

    - Scores are probabilities times `scale`. `normalize_top_k` first divides a token's K
      probabilities by their sum.
    - A "sigmoid" router adds `expert_bias` [E] for the choice only (DeepSeek-V3,
      https://arxiv.org/abs/2412.19437, equation 16). Biases in bfloat16 would change the choice.
    - `groups` (n, k) limits the choice to the best k of n groups.
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
        groups: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        bias = torch.zeros(num_experts, dtype=torch.float32) if kind == "sigmoid" else None
        self.register_buffer("expert_bias", bias)
        self.num_experts_per_token = num_experts_per_token
        self.normalize_top_k, self.scale = normalize_top_k, scale

    def forward(
        self, x_TD: Tensor, replayed_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return scores f32 [T, K], expert ids i64 [T, K], and the number of differing ids.

        Valid ids in `replayed_TK` replace the router's choice. They differ if the router did not
        choose them for the token.
        """
        logit_TE, epsilon = wide_linear(x_TD, self.weight), 0.0
        if self.expert_bias is None:
            probability_TE = logit_TE.softmax(dim=-1)
            choice_TE = probability_TE.detach()
        else:
            probability_TE, epsilon = logit_TE.sigmoid(), 1e-20
            choice_TE = probability_TE.detach() + self.expert_bias
        if self.groups is not None:
            choice_TE = _keep_groups(choice_TE, *self.groups)
        expert_TK, num_differing = choice_TE.topk(self.num_experts_per_token, dim=-1).indices, None
        if replayed_TK is not None:
            num_experts = probability_TE.shape[1]
            expert_TK, num_differing = _replay(replayed_TK.long(), expert_TK, num_experts)
        score_TK = probability_TE.gather(1, expert_TK)
        if self.normalize_top_k:
            score_TK = score_TK / (score_TK.sum(dim=-1, keepdim=True) + epsilon)
        return score_TK if self.scale == 1.0 else score_TK * self.scale, expert_TK, num_differing


def _keep_groups(choice_TE: Tensor, num_groups: int, num_kept: int) -> Tensor:
    """Keep the `num_kept` groups whose two best values have the highest sums. Set others to −∞."""
    choice_TGE = choice_TE.unflatten(-1, (num_groups, -1))
    best_TG = choice_TGE.topk(2, dim=-1).values.sum(dim=-1)
    kept_TG = best_TG.topk(num_kept, dim=-1).indices
    is_left_out_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter(1, kept_TG, False)
    return choice_TGE.masked_fill(is_left_out_TG[..., None], -torch.inf).flatten(1)


def _replay(replayed_TK: Tensor, own_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    is_route_TK = (replayed_TK >= 0) & (replayed_TK < num_experts)
    is_own_TK = (replayed_TK.unsqueeze(2) == own_TK.unsqueeze(1)).any(dim=2)
    return torch.where(is_route_TK, replayed_TK, own_TK), (is_route_TK & ~is_own_TK).sum()


class Experts(nn.Module):
    """Stacked expert weights. `gate_up_proj` [E, 2·I, D] has gate rows before up rows."""

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, is_fp8: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_fp8: Parts | None = [] if is_fp8 else None
        self.down_fp8: Parts | None = [] if is_fp8 else None
        self.row_block = BLOCK if is_fp8 else 1  # alignment of each expert's first row
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.gate_up_lora: Adapter | None = None
        self.down_lora: Adapter | None = None

    def forward(self, x_TD: Tensor, score_TK: Tensor, rows: RowOrder) -> Tensor:
        """Return [T, D]: each token's sum of score · output over its experts on this rank."""
        if self.gate_up_fp8 is not None and self.down_fp8 is not None:
            weights, parts = (self.gate_up_proj, self.down_proj), (self.gate_up_fp8, self.down_fp8)
            return fp8_experts(x_TD, score_TK, rows, weights, parts)
        x_MD, score_M, ends_E = gather_rows(x_TD, rows), order_slots(score_TK, rows), rows.ends_E
        gate_up_M2I = _project(x_MD, self.gate_up_proj, self.gate_up_lora, ends_E)
        act_MI = self.activate(gate_up_M2I, score_M)
        return combine_rows(_project(act_MI, self.down_proj, self.down_lora, ends_E), rows)

    def forward_chunks(
        self,
        chunks: Sequence[tuple[Tensor, ...]],
        before: Sequence[Callable[..., tuple[Tensor, Tensor, RowOrder]]],
        after: Sequence[Callable[[Tensor], Tensor]],
    ) -> list[Tensor]:
        return [
            end(self.forward(*begin(*chunk, self.row_block)))
            for chunk, begin, end in zip(chunks, before, after, strict=True)
        ]

    def activate(self, gate_up_M2I: Tensor, score_M: Tensor) -> Tensor:
        return swiglu_rows(gate_up_M2I, score_M)


def _project(x_MK: Tensor, weight_ENK: Tensor, adapter: Adapter | None, ends_E: Tensor) -> Tensor:
    if adapter is None:
        return grouped_matmul(x_MK, weight_ENK, ends_E)
    return adapted_grouped_matmul(x_MK, weight_ENK, *adapter.scaled(x_MK.dtype), ends_E)


class LocalExchange(nn.Module):
    """Experts on one rank. Expert parallelism replaces this module."""

    def forward(
        self, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, experts: Experts
    ) -> Tensor:
        rows = sort_by_expert(expert_TK, experts.down_proj.shape[0], experts.row_block)
        return experts(x_TD, score_TK, rows)


class RouteCounts(NamedTuple):
    load_E: Tensor  # i64, tokens per expert, without padding
    num_differing: Tensor | None  # i64 [], see `Router.forward`


class MixtureOfExperts(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        moe: MoE,
        fp8: Sequence[str] = (),
        groups: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        sizes = (hidden_size, moe.num_experts, moe.num_experts_per_token)
        self.gate = Router(*sizes, moe.normalize_top_k, moe.score, moe.routed_scale, groups)
        width = moe.expert_intermediate_size
        self.experts = Experts(moe.num_experts, hidden_size, width, "experts" in fp8)
        self.exchange: nn.Module = LocalExchange()
        self.shared_experts = None
        if shared := moe.num_shared_experts * width:
            self.shared_experts = FeedForward(hidden_size, shared, "feed_forward" in fp8)

    def forward(
        self,
        x_TD: Tensor,
        replayed_TK: Tensor | None = None,
        is_padding_T: Tensor | None = None,
    ) -> tuple[Tensor, RouteCounts]:
        score_TK, expert_TK, num_differing = self.gate(x_TD, replayed_TK)
        out_TD = self.exchange(x_TD, score_TK, expert_TK, self.experts)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(x_TD)
        load_E = count_tokens(expert_TK, self.gate.weight.shape[0], is_padding_T)
        return out_TD, RouteCounts(load_E, num_differing)


def count_tokens(expert_TK: Tensor, num_experts: int, is_padding_T: Tensor | None) -> Tensor:
    counted_TK = torch.ones_like(expert_TK)
    if is_padding_T is not None:
        counted_TK = counted_TK.masked_fill(is_padding_T[:, None], 0)
    load_E = counted_TK.new_zeros(num_experts)
    return load_E.scatter_add(0, expert_TK.flatten(), counted_TK.flatten())
