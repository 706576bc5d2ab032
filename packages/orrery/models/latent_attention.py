"""Multi-head latent attention (MLA): dense, or sparse with keys chosen by an indexer.

Shapes: T queries, S keys (S = T without context parallelism), D hidden, H heads, C latent width, N
unrotated head width, R rotated width, V value width, W = C + R latent key width, K chosen keys
(THK, SHK: K = N + R), J indexer heads, I indexer width, B bytes as in `key_bits`

MLA: DeepSeek-V2, https://arxiv.org/abs/2405.04434. Sparse attention: DeepSeek-V3.2,
https://arxiv.org/abs/2512.02556. Shared keys: GLM-5.1, https://arxiv.org/abs/2603.12201.
Attention is dense if no document exceeds the indexer's `top_k` tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orrery.kernels import sparse_index_fp8
from orrery.kernels.attention import Documents, varlen_attention
from orrery.kernels.dense_products import head_products
from orrery.kernels.fp8.products import Parts
from orrery.kernels.key_bits import compare_sample, engine_keys
from orrery.kernels.sparse_index import select_keys
from orrery.kernels.sparse_index_loss import attention_of_chosen, chosen_scores, index_kl
from orrery.kernels.sparse_mla import sparse_mla
from orrery.manifest.schema import MLA, Indexer, Model, YarnRopeScaling
from orrery.models.layers import apply_rotary, project, yarn_scale

INDEXER_EPSILON = 1e-6  # as in DeepSeek-V3.2 and GLM-5


def rotate_pairs(x_THR: Tensor, angles: Sequence[Tensor]) -> Tensor:
    """Rotate column pairs (0, 1), (2, 3), …. Return even columns, then odd columns."""
    return apply_rotary(torch.cat((x_THR[..., ::2], x_THR[..., 1::2]), dim=-1), *angles)


def rotate_halves(x_THR: Tensor, angles: Sequence[Tensor]) -> Tensor:
    return apply_rotary(x_THR, *angles)


class ChosenKeys(NamedTuple):
    """Keys chosen by an indexer. `score_TK` and `kl` are None for frozen indexers."""

    chosen_TK: Tensor  # i32 key indices, −1 for none
    score_TK: Tensor | None = None  # f32
    kl: Tensor | None = None  # f32 [], sum of indexer losses up to this layer
    differ: Tensor | None = None  # i64 [2], counts of `engine_keys`, summed up to this layer


class KeyIndexer(nn.Module):
    """Choose for query t the keys s with the highest Σ_j w_tj · relu(q_tj · k_s) / √(J · I).

    `turns_pairs`: rotate column pairs (2i, 2i + 1) of q and k, as GLM-5. DeepSeek-V3.2 rotates
    (i, i + R/2).
    """

    def __init__(self, hidden_size: int, mla: MLA, indexer: Indexer, turns_pairs: bool) -> None:
        super().__init__()
        self.turns_pairs = turns_pairs
        self.rotate = rotate_pairs if turns_pairs else rotate_halves
        self.replays = False  # set by `replay_choices`
        self.indexer, self.rotary_dim = indexer, mla.rope_head_dim
        width, num_heads = indexer.head_dim, indexer.num_heads
        self.wq_b = nn.Linear(mla.q_lora_rank, num_heads * width, bias=False)
        self.wk = nn.Linear(hidden_size, width, bias=False)
        self.k_norm = nn.LayerNorm(width, INDEXER_EPSILON)
        self.weights_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.requires_grad_(False)

    @property
    def learns(self) -> bool:
        return self.wk.weight.requires_grad and torch.is_grad_enabled()

    def in_fp8(self, x_TD: Tensor) -> bool:
        """Return whether to choose keys by FP8 scores, as vLLM does."""
        return sparse_index_fp8.supports(x_TD, self.indexer.num_heads, self.indexer.head_dim)

    def keys(self, x_TD: Tensor, angles: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's indexer keys: [T, I], or packed FP8 keys and scales [T, ·].

        Return both to train the indexer with FP8 scores.
        """
        k_TI = self.wk(x_TD.detach())
        if not self.in_fp8(x_TD):
            return [self._rotate(self.k_norm(k_TI)[:, None], angles)[:, 0]]
        weight, bias = self.k_norm.weight.float(), self.k_norm.bias.float()
        normed_TI = F.layer_norm(
            k_TI.float(), (self.indexer.head_dim,), weight, bias, INDEXER_EPSILON
        )
        fp8 = sparse_index_fp8.quantize_index(normed_TI[:, None], angles, self.turns_pairs)
        packed = sparse_index_fp8.pack(*fp8, x_TD.dtype)
        if not self.learns:
            return [packed]
        return [self._rotate(normed_TI.to(x_TD.dtype)[:, None], angles)[:, 0], packed]

    def forward(
        self,
        x_TD: Tensor,
        q_TC: Tensor,
        angles: Sequence[Tensor],
        keys: Sequence[Tensor],
        ranges: tuple[Tensor, Tensor],
        longest: int,
        engine_keys_TB: Tensor | None = None,
    ) -> ChosenKeys:
        """Choose at most K = min(`top_k`, `longest`) keys per query, padded with −1.

        - `keys`: results of method `keys`, gathered from all ranks.
        - `longest`: length of the longest document.
        - `engine_keys_TB`: an engine's keys, as bits if `replays`, else as a sample to compare.
        """
        width, num_heads = self.indexer.head_dim, self.indexer.num_heads
        q_TJI = self.wq_b(q_TC.detach()).unflatten(-1, (num_heads, width))
        gate_TJ = self.weights_proj(x_TD.detach()).float()
        is_fp8, learns = self.in_fp8(x_TD), self.learns
        if learns or not is_fp8:
            scored = self._rotate(q_TJI, angles), keys[0], gate_TJ * (num_heads * width) ** -0.5
        if is_fp8:
            q, scale_TJ = sparse_index_fp8.quantize_index(q_TJI, angles, self.turns_pairs)
            # vLLM's order, for equal rounding
            compared = q, keys[-1], gate_TJ.detach() * scale_TJ * width**-0.5 * num_heads**-0.5
        else:
            compared = scored
        # Columns after `longest` are all −1.
        chosen_TK = select_keys(*compared, *ranges, self.indexer.top_k)[:, :longest]
        differ = None
        if engine_keys_TB is not None and longest > self.indexer.top_k:
            if self.replays:
                chosen_TK, differ = engine_keys(engine_keys_TB, chosen_TK, *ranges)
            else:
                differ = compare_sample(engine_keys_TB, chosen_TK, *ranges)
        score_TK = chosen_scores(*scored, chosen_TK) if learns else None
        return ChosenKeys(chosen_TK, score_TK, differ=differ)

    def _rotate(self, x_TJI: Tensor, angles: Sequence[Tensor]) -> Tensor:
        turning, still = x_TJI[..., : self.rotary_dim], x_TJI[..., self.rotary_dim :]
        return torch.cat((self.rotate(turning, angles), still), dim=-1)


class LocalKeys(nn.Module):
    """One rank's keys. Context parallelism replaces this module to gather keys."""

    is_gathered = False

    def send(self, keys: Sequence[Tensor], documents: Documents, is_latent: bool) -> Any:
        """Start gathering tensors [T, ·]. `receive` returns them as [S, ·]."""
        return keys

    def receive(self, sent: Any) -> Sequence[Tensor]:
        return sent

    def ranges(self, documents: Documents, num_queries: int) -> tuple[Tensor, Tensor]:
        """Return each query's first and last visible key, i32 [T] each."""
        last_T = torch.arange(num_queries, dtype=torch.int32, device=documents.cu_seqlens.device)
        document_T = torch.searchsorted(documents.cu_seqlens, last_T, right=True) - 1
        return documents.cu_seqlens[document_T], last_T

    def sides(self, documents: Documents) -> tuple[Documents, Documents]:
        return documents, documents


def every_key(first_T: Tensor, last_T: Tensor, longest: int) -> Tensor:
    """Return i32 [T, longest]. Row t has indices `first_T[t]` to `last_T[t]`, then −1."""
    key_TK = first_T[:, None] + torch.arange(longest, dtype=torch.int32, device=first_T.device)
    return key_TK.masked_fill(key_TK > last_T[:, None], -1)


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
        # q_a and kv_a are too narrow for FP8. `absorb` reads kv_b unquantized.
        is_fp8 = "attention" in (config.fp8 or ())
        self.q_b_fp8: Parts | None = [] if is_fp8 else None
        self.o_fp8: Parts | None = [] if is_fp8 else None
        self.keys: nn.Module = LocalKeys()
        self.indexer, self.num_served = None, 1
        if (indexer := mla.indexer) and indexer.types is not None:
            self.num_served = num_served(indexer.types, index)
        if (indexer := mla.indexer) and (indexer.types is None or indexer.types[index] == "full"):
            self.indexer = KeyIndexer(hidden_size, mla, indexer, config.family == "glm5")

    def forward(
        self,
        x_TD: Tensor,
        angles: Sequence[Tensor],
        documents: Documents,
        choice: ChosenKeys | None = None,
        engine_keys_TB: Tensor | None = None,
    ) -> tuple[Tensor, ChosenKeys | None]:
        """Return the output [T, D], and the `choice` for the next layer.

        A layer without an indexer returns the previous layer's `choice`.
        """
        mla, indexer = self.mla, self.indexer
        is_sparse = mla.indexer is not None and documents.max_seqlen > mla.indexer.top_k
        if indexer is not None and not is_sparse and not indexer.learns:
            indexer = None
        latent_TC, k_TR = self.kv_a_proj_with_mqa(x_TD).split(
            (mla.kv_lora_rank, mla.rope_head_dim), dim=-1
        )
        k_TR = rotate_pairs(k_TR[:, None], angles)[:, 0]
        keys = [torch.cat((self.kv_a_layernorm(latent_TC), k_TR), dim=-1)]
        if indexer is not None:
            keys += indexer.keys(x_TD, angles)
        # Gathered keys stay latent, so that no rank expands the keys of all ranks.
        is_latent = is_sparse or (mla.indexer is not None and self.keys.is_gathered)
        sent = self.keys.send(keys, documents, is_latent)
        q_TC = self.q_a_layernorm(self.q_a_proj(x_TD))
        q_THN, q_THR = self.project_queries(q_TC, angles)
        kv_SW, *index_keys = self.keys.receive(sent)
        if indexer is not None:
            kl, differ = (None, None) if choice is None else (choice.kl, choice.differ)
            ranges = self.keys.ranges(documents, x_TD.shape[0])
            given = (index_keys, ranges, documents.max_seqlen, engine_keys_TB)
            choice = indexer(x_TD, q_TC, angles, *given)
            if choice.differ is not None and differ is not None:
                choice = choice._replace(differ=differ + choice.differ)
            choice = choice._replace(kl=kl)
        learning = choice if choice is not None and choice.score_TK is not None else None
        if is_latent or learning is not None:
            q_THW = self.absorb(q_THN, q_THR)
        if learning is not None:
            choice = self._with_loss(learning, q_THW, kv_SW, documents)
        if is_latent:
            if choice is not None:
                chosen_TK = choice.chosen_TK
            else:
                assert not is_sparse  # the schema requires an indexer in the first layer
                first_T, last_T = self.keys.ranges(documents, x_TD.shape[0])
                chosen_TK = every_key(first_T, last_T, documents.max_seqlen)
            out_THV = self._attend_sparsely(q_THW, kv_SW, chosen_TK)
        else:
            out_THV = self._attend_densely(q_THN, q_THR, kv_SW, documents)
        return project(out_THV.flatten(1), self.o_fp8, self.o_proj)[0], choice

    def project_queries(self, q_TC: Tensor, angles: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        mla = self.mla
        (q,) = project(q_TC, self.q_b_fp8, self.q_b_proj)
        q_THK = q.unflatten(-1, (-1, mla.nope_head_dim + mla.rope_head_dim))
        q_THN, q_THR = q_THK.split((mla.nope_head_dim, mla.rope_head_dim), dim=-1)
        return q_THN, rotate_pairs(q_THR, angles)

    def _with_loss(
        self, choice: ChosenKeys, q_THW: Tensor, kv_SW: Tensor, documents: Documents
    ) -> ChosenKeys:
        """Return `choice` after adding this indexer's loss / `num_served` to `kl`."""
        attention_TK = attention_of_chosen(q_THW, kv_SW, choice.chosen_TK, self.scale)
        kl_T = index_kl(choice.score_TK, attention_TK, choice.chosen_TK)
        if documents.is_padding is not None:
            kl_T = kl_T.masked_fill(documents.is_padding, 0.0)
        kl = kl_T.sum() / self.num_served
        return choice._replace(kl=kl if choice.kl is None else choice.kl + kl)

    def _attend_densely(
        self, q_THN: Tensor, q_THR: Tensor, kv_SW: Tensor, documents: Documents
    ) -> Tensor:
        of_q, of_k = self.keys.sides(documents)
        out_THK = varlen_attention(*self.expand(q_THN, q_THR, kv_SW), of_q, documents_k=of_k)
        return out_THK[..., : self.mla.value_head_dim]

    def expand(self, q_THN: Tensor, q_THR: Tensor, kv_SW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each head's queries, keys and values, zero-padded to one width."""
        mla = self.mla
        latent_SC, k_SR = kv_SW.split((mla.kv_lora_rank, mla.rope_head_dim), dim=-1)
        expanded = self.kv_b_proj(latent_SC).unflatten(-1, (q_THN.shape[1], -1))
        k_SHN, v_SHV = expanded.split((mla.nope_head_dim, mla.value_head_dim), dim=-1)
        q_THK = torch.cat((q_THN, q_THR), dim=-1)
        k_SHR = k_SR[:, None].expand(-1, q_THN.shape[1], -1)
        k_SHK = torch.cat((k_SHN, k_SHR), dim=-1)
        key_width, value_width = q_THK.shape[-1], mla.value_head_dim
        width = max(key_width, value_width)
        if (factor := self.scale * width**0.5) != 1.0:  # `varlen_attention` scales by width^-1/2
            q_THK = q_THK * factor
        q_THK, k_SHK = (F.pad(x, (0, width - key_width)) for x in (q_THK, k_SHK))
        return q_THK, k_SHK, F.pad(v_SHV, (0, width - value_width))

    def absorb(self, q_THN: Tensor, q_THR: Tensor) -> Tensor:
        """Return queries [T, H, W] for latent keys: [q_THN · `kv_b_proj`'s key rows, q_THR]."""
        key_HNC, _ = self._up_projections()
        return head_products(q_THN, key_HNC.to(q_THN.dtype), q_THR)

    def _attend_sparsely(self, q_THW: Tensor, kv_SW: Tensor, chosen_TK: Tensor) -> Tensor:
        _, value_HVC = self._up_projections()
        out_THC, _ = sparse_mla(q_THW, kv_SW, chosen_TK, self.scale, self.mla.kv_lora_rank)
        return head_products(out_THC, value_HVC.to(out_THC.dtype).transpose(1, 2))

    def _up_projections(self) -> tuple[Tensor, ...]:
        mla = self.mla
        up_HUC = self.kv_b_proj.weight.unflatten(0, (-1, mla.nope_head_dim + mla.value_head_dim))
        return up_HUC.split((mla.nope_head_dim, mla.value_head_dim), dim=1)


def num_served(types: Sequence[str], index: int) -> int:
    """Return how many layers use the keys chosen for layer `index`, including itself.

    A "shared" layer uses the previous "full" layer's keys.
    """
    first = max(i for i in range(index + 1) if types[i] == "full")
    after = (i for i in range(first + 1, len(types)) if types[i] == "full")
    return next(after, len(types)) - first


def train_indexers(module: nn.Module) -> None:
    for one in module.modules():
        if isinstance(one, KeyIndexer):
            one.requires_grad_(True)


def replay_choices(module: nn.Module) -> None:
    for one in module.modules():
        if isinstance(one, KeyIndexer):
            one.replays = True
