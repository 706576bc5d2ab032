"""Multi-head latent attention (MLA), dense or to the keys that an indexer chooses.

T tokens · S keys, T unless ranks share documents · D hidden · H heads · J indexer heads
N, R, V widths of a head without rotation, with it, of values · C latent width (`kv_lora_rank`)
W = C + R · I width of the indexer's keys · K chosen keys

- MLA: DeepSeek-V2, https://arxiv.org/abs/2405.04434. Sparse attention: DeepSeek-V3.2,
  https://arxiv.org/abs/2512.02556. Shared choices: GLM-5.1, https://arxiv.org/abs/2603.12201.
- While no document is longer than the indexer's `top_k`, all layers are dense.
- The indexer is frozen: its choice passes no gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orrery.kernels.attention import Documents, varlen_attention
from orrery.kernels.sparse_index import select_keys
from orrery.kernels.sparse_mla import sparse_mla
from orrery.manifest.schema import MLA, Indexer, Model, YarnRopeScaling
from orrery.models.layers import apply_rotary, yarn_scale

INDEXER_EPSILON = 1e-6  # a constant of DeepSeek-V3.2's and GLM-5's code


def rotate_pairs(x_THR: Tensor, angles: Sequence[Tensor]) -> Tensor:
    """Rotate pairs (0, 1), (2, 3), …. Return their first elements, then their second."""
    return apply_rotary(torch.cat((x_THR[..., ::2], x_THR[..., 1::2]), dim=-1), *angles)


def rotate_halves(x_THR: Tensor, angles: Sequence[Tensor]) -> Tensor:
    return apply_rotary(x_THR, *angles)


class KeyIndexer(nn.Module):
    """Choose keys by score_ts = Σ_j w_tj · relu(q_tj · k_s) / √(J · width).

    Before this, GLM-5 rotates pairs of q and k, DeepSeek-V3.2 rotates halves.
    """

    def __init__(self, hidden_size: int, mla: MLA, indexer: Indexer, turns_pairs: bool) -> None:
        super().__init__()
        self.rotate = rotate_pairs if turns_pairs else rotate_halves
        self.indexer, self.rotary_dim = indexer, mla.rope_head_dim
        width, num_heads = indexer.head_dim, indexer.num_heads
        self.wq_b = nn.Linear(mla.q_lora_rank, num_heads * width, bias=False)
        self.wk = nn.Linear(hidden_size, width, bias=False)
        self.k_norm = nn.LayerNorm(width, INDEXER_EPSILON)
        self.weights_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def keys(self, x_TD: Tensor, angles: Sequence[Tensor]) -> Tensor:
        return self._rotate(self.k_norm(self.wk(x_TD))[:, None], angles)[:, 0]

    @torch.no_grad()
    def forward(
        self,
        x_TD: Tensor,
        q_TC: Tensor,
        angles: Sequence[Tensor],
        k_SI: Tensor,
        ranges: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return i32 [T, top_k] indices of keys in k, −1 for none."""
        width, num_heads = self.indexer.head_dim, self.indexer.num_heads
        q_TJI = self._rotate(self.wq_b(q_TC).unflatten(-1, (num_heads, width)), angles)
        weight_TJ = self.weights_proj(x_TD).float() * (num_heads * width) ** -0.5
        return select_keys(q_TJI, k_SI, weight_TJ, *ranges, self.indexer.top_k)

    def _rotate(self, x_TJI: Tensor, angles: Sequence[Tensor]) -> Tensor:
        turning, still = x_TJI[..., : self.rotary_dim], x_TJI[..., self.rotary_dim :]
        return torch.cat((self.rotate(turning, angles), still), dim=-1)


class LocalKeys(nn.Module):
    """Give queries the keys of this device. Context parallelism replaces the module.

    `send` may return early, so that queries are made while keys travel. `receive` waits.
    """

    def send(self, keys: Sequence[Tensor], documents: Documents, is_sparse: bool) -> Any:
        """Begin to turn each [T, ·] into [S, ·]."""
        return keys

    def receive(self, sent: Any) -> Sequence[Tensor]:
        return sent

    def ranges(self, documents: Documents, num_queries: int) -> tuple[Tensor, Tensor]:
        """Return the first and last key of each query, i32 [T]: its document up to itself."""
        last_T = torch.arange(num_queries, dtype=torch.int32, device=documents.cu_seqlens.device)
        document_T = torch.searchsorted(documents.cu_seqlens, last_T, right=True) - 1
        return documents.cu_seqlens[document_T], last_T

    def sides(self, documents: Documents) -> tuple[Documents, Documents]:
        """Return the documents of queries and of keys in dense attention."""
        return documents, documents


class LatentAttention(nn.Module):
    def __init__(self, config: Model, index: int) -> None:
        super().__init__()
        mla, hidden_size, num_heads = config.latent, config.hidden_size, config.num_heads
        self.mla, self.scale = mla, config.head_dim**-0.5
        if isinstance(config.rope_scaling, YarnRopeScaling):
            self.scale *= yarn_scale(config.rope_scaling, config.rope_scaling.score_scale) ** 2
        kv_width = mla.kv_lora_rank + mla.rope_head_dim
        up_width = mla.nope_head_dim + mla.value_head_dim
        self.q_a_proj = nn.Linear(hidden_size, mla.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(mla.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(mla.q_lora_rank, num_heads * config.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, kv_width, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(mla.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(mla.kv_lora_rank, num_heads * up_width, bias=False)
        self.o_proj = nn.Linear(num_heads * mla.value_head_dim, hidden_size, bias=False)
        self.keys: nn.Module = LocalKeys()
        self.indexer = None
        if (indexer := mla.indexer) and (indexer.types is None or indexer.types[index] == "full"):
            self.indexer = KeyIndexer(hidden_size, mla, indexer, config.family == "glm5")

    def forward(
        self,
        x_TD: Tensor,
        angles: Sequence[Tensor],
        documents: Documents,
        chosen_TK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [T, D] and the chosen keys, None if all layers are dense.

        A layer without an indexer attends to `chosen_TK` of the layer before it.
        """
        mla = self.mla
        is_sparse = mla.indexer is not None and documents.max_seqlen > mla.indexer.top_k
        latent_TC, k_TR = self.kv_a_proj_with_mqa(x_TD).split(
            (mla.kv_lora_rank, mla.rope_head_dim), dim=-1
        )
        k_TR = rotate_pairs(k_TR[:, None], angles)[:, 0]
        keys = [torch.cat((self.kv_a_layernorm(latent_TC), k_TR), dim=-1)]
        if is_sparse and self.indexer is not None:
            keys.append(self.indexer.keys(x_TD, angles))
        sent = self.keys.send(keys, documents, is_sparse)
        q_TC = self.q_a_layernorm(self.q_a_proj(x_TD))
        q_THK = self.q_b_proj(q_TC).unflatten(-1, (-1, mla.nope_head_dim + mla.rope_head_dim))
        q_THN, q_THR = q_THK.split((mla.nope_head_dim, mla.rope_head_dim), dim=-1)
        q_THR = rotate_pairs(q_THR, angles)
        kv_SW, *k_SI = self.keys.receive(sent)
        if not is_sparse:
            out_THV = self._attend_densely(q_THN, q_THR, kv_SW, documents)
            return self.o_proj(out_THV.flatten(1)), None
        if self.indexer is not None:
            ranges = self.keys.ranges(documents, x_TD.shape[0])
            chosen_TK = self.indexer(x_TD, q_TC, angles, *k_SI, ranges)
        assert chosen_TK is not None  # the schema wants an indexer in the first layer
        out_THV = self._attend_sparsely(q_THN, q_THR, kv_SW, chosen_TK)
        return self.o_proj(out_THV.flatten(1)), chosen_TK

    def _attend_densely(
        self, q_THN: Tensor, q_THR: Tensor, kv_SW: Tensor, documents: Documents
    ) -> Tensor:
        """Expand keys and values, and pad the narrower of both with zeros to one width."""
        mla = self.mla
        latent_SC, k_SR = kv_SW.split((mla.kv_lora_rank, mla.rope_head_dim), dim=-1)
        expanded = self.kv_b_proj(latent_SC).unflatten(-1, (q_THN.shape[1], -1))
        k_SHN, v_SHV = expanded.split((mla.nope_head_dim, mla.value_head_dim), dim=-1)
        q_THK = torch.cat((q_THN, q_THR), dim=-1)
        k_SHR = k_SR[:, None].expand(-1, q_THN.shape[1], -1)
        k_SHK = torch.cat((k_SHN, k_SHR), dim=-1)
        key_width, value_width = q_THK.shape[-1], mla.value_head_dim
        width = max(key_width, value_width)
        if (factor := self.scale * width**0.5) != 1.0:  # attention scales by the padded width
            q_THK = q_THK * factor
        q_THK, k_SHK = (F.pad(x, (0, width - key_width)) for x in (q_THK, k_SHK))
        v_SHK = F.pad(v_SHV, (0, width - value_width))
        of_q, of_k = self.keys.sides(documents)
        out_THK = varlen_attention(q_THK, k_SHK, v_SHK, of_q, documents_k=of_k)
        return out_THK[..., :value_width]

    def _attend_sparsely(
        self, q_THN: Tensor, q_THR: Tensor, kv_SW: Tensor, chosen_TK: Tensor
    ) -> Tensor:
        """Attend in latent space: heads share keys, and `kv_b_proj` moves to queries and output."""
        mla = self.mla
        up_HUC = self.kv_b_proj.weight.unflatten(0, (q_THN.shape[1], -1))
        key_HNC, value_HVC = up_HUC.split((mla.nope_head_dim, mla.value_head_dim), dim=1)
        q_THC = torch.einsum("thn,hnc->thc", q_THN, key_HNC.to(q_THN.dtype))
        q_THW = torch.cat((q_THC, q_THR), dim=-1)
        out_THC, _ = sparse_mla(q_THW, kv_SW, chosen_TK, self.scale, mla.kv_lora_rank)
        return torch.einsum("thc,hvc->thv", out_THC, value_HVC.to(out_THC.dtype))
