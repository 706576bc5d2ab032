"""Define the interface of all networks, and our own decoder.

Shapes: T tokens, D hidden, V vocabulary, L layers with experts, E experts, K experts per token,
I indexers, B bytes (or samples) of chosen keys
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orrery.kernels.attention import Documents
from orrery.kernels.token_logprob import ChunkTokens, token_logprob
from orrery.manifest.schema import Model
from orrery.manifest.schema.model import EXPERT_GROUPS
from orrery.models.latent_attention import ChosenKeys, LatentAttention
from orrery.models.layers import (
    Attention,
    FeedForward,
    MixtureOfExperts,
    RouteCounts,
    rotary_angles,
)

# Our parameter name → Hugging Face's. `{expert}` stands for an index in dimension 0.
Names = dict[str, str | tuple[str, ...]]  # several names split dim 0 evenly, or dim 1 with {expert}


class LmHead(nn.Module):
    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(
        self,
        hidden_TD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        chunk_tokens: ChunkTokens,
        keep_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        rows = (target_T, temperature_T)
        return token_logprob(hidden_TD, self.weight, *rows, chunk_tokens, keep_logits=keep_logits)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return F.linear(hidden_TD.float(), self.weight.float())


class CausalLm(nn.Module):
    """A network with hidden states (`forward`) and log-probs (`log_probs`) of packed tokens.

    Subclasses define `layers`, `lm_head` (None if tied), `lm_head_weight` and `hidden_states`.
    """

    layers: nn.ModuleList
    lm_head: Any
    names: Names | None = None  # None: `families.hf_names` returns our families' names
    # Results of the latest forward pass:
    num_routes_differ: Tensor | None = None  # i64 [], see `Router.forward`
    expert_load_LE: Tensor | None = None  # i64
    choices_differ: Tensor | None = None  # i64 [2], see `ChosenKeys.differ`
    indexer_kl: Tensor | None = None  # f32 [], see `ChosenKeys.kl`

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config

    @property
    def lm_head_weight(self) -> Tensor:
        """Return the weight [V, D] of the LM head or the tied embedding."""
        raise NotImplementedError

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Tensor,
        routed_experts_TLK: Tensor | None = None,
        max_seqlen: int | None = None,
        engine_keys_TIB: Tensor | None = None,
        is_padding_T: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [T, D] of packed documents after the final norm.

        - `token_ids`, `positions`: i64 [T].
        - `cu_seqlens`: i32 [n + 1], from 0 to T. `max_seqlen` saves a device-to-host copy.
        - `routed_experts`: integers [T, L, K], an engine's choice of experts.
        - `engine_keys`: an engine's choice of keys (`kernels/key_bits`): bits, u8 [T, I, B], or
          samples, i32 [T, I, B].
        - `is_padding`: bool [T], tokens excluded from indexer loss and expert load.
        """
        documents = Documents(cu_seqlens, max_seqlen, is_padding_T)
        replayed = routed_experts_TLK, engine_keys_TIB
        return self.hidden_states(token_ids_T, positions_T, documents, *replayed)

    def hidden_states(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        documents: Documents,
        routes: Tensor | None,
        engine_keys_TIB: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError

    def compute_buffers(self) -> None:
        """Fill the allocated non-persistent buffers."""

    def initial_tensor(self, parameter_name: str, seed: int, std: float) -> Tensor | None:
        """Return a parameter's unsharded initial value on CPU. None: `weights._draw` draws it."""
        return None

    def log_probs(
        self,
        hidden_TD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        chunk_tokens: ChunkTokens,
        keep_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs of target tokens, and entropies: f32 [T] each, differentiable."""
        rows = (target_T, temperature_T)
        if self.lm_head is not None:
            return self.lm_head(hidden_TD, *rows, chunk_tokens, keep_logits)
        weight_VD = self.lm_head_weight
        return token_logprob(hidden_TD, weight_VD, *rows, chunk_tokens, keep_logits=keep_logits)

    @torch.no_grad()
    def logits(self, token_ids_T: Tensor, positions_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        hidden_TD = self(token_ids_T, positions_T, cu_seqlens)
        if self.lm_head is not None:
            return self.lm_head.logits(hidden_TD)
        return F.linear(hidden_TD.float(), self.lm_head_weight.float())


class TransformerBlock(nn.Module):
    def __init__(self, config: Model, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn: Attention | LatentAttention
        self.self_attn = Attention(config) if config.mla is None else LatentAttention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: FeedForward | MixtureOfExperts
        fp8 = config.fp8 or ()
        if config.moe is not None and index >= config.moe.num_dense_layers:
            groups = EXPERT_GROUPS.get(config.family)
            self.mlp = MixtureOfExperts(config.hidden_size, config.moe, fp8, groups)
        else:
            sizes = config.hidden_size, config.intermediate_size
            self.mlp = FeedForward(*sizes, "feed_forward" in fp8)

    def forward(
        self,
        x_TD: Tensor,
        angles: Sequence[Tensor],
        documents: Documents,
        replayed_TK: Tensor | None = None,
        choice: ChosenKeys | None = None,
        engine_keys_TB: Tensor | None = None,
    ) -> tuple[Tensor, RouteCounts | None, ChosenKeys | None]:
        """Return output [T, D], route counts (None without experts), keys for later blocks."""
        inner_TD = self.input_layernorm(x_TD)
        if isinstance(self.self_attn, LatentAttention):
            out_TD, choice = self.self_attn(inner_TD, angles, documents, choice, engine_keys_TB)
        else:
            out_TD = self.self_attn(inner_TD, angles, documents)
        x_TD = x_TD + out_TD
        inner_TD = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, MixtureOfExperts):
            out_TD, counts = self.mlp(inner_TD, replayed_TK, documents.is_padding)
            return x_TD + out_TD, counts, choice
        return x_TD + self.mlp(inner_TD), None, choice


class Decoder(CausalLm):
    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            TransformerBlock(config, index) for index in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_embeddings:
            self.lm_head = LmHead(config.hidden_size, config.vocab_size)

    @property
    def lm_head_weight(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden_states(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        documents: Documents,
        routes: Tensor | None,
        engine_keys_TIB: Tensor | None = None,
    ) -> Tensor:
        config = self.config
        hidden_TD = self.embed_tokens(token_ids_T)
        rotary_dim = int(config.head_dim * config.rotary_fraction)
        if config.mla is not None:
            rotary_dim = config.mla.rope_head_dim
        rotary = (rotary_dim, config.rope_theta)
        angles = rotary_angles(positions_T, *rotary, hidden_TD.dtype, config.rope_scaling)
        counted: list[RouteCounts] = []
        choice: ChosenKeys | None = None
        first = config.num_layers if config.moe is None else config.moe.num_dense_layers
        of_indexers = iter(() if engine_keys_TIB is None else engine_keys_TIB.unbind(1))
        for index, layer in enumerate(self.layers):
            replayed_TK = None if routes is None or index < first else routes[:, index - first]
            has_indexer = getattr(layer.self_attn, "indexer", None) is not None
            keys_TB = next(of_indexers, None) if has_indexer else None
            given = (hidden_TD, angles, documents, replayed_TK, choice, keys_TB)
            hidden_TD, counts, choice = layer(*given)
            if counts is not None:
                counted.append(counts)
        differ = [one.num_differing for one in counted if one.num_differing is not None]
        self.num_routes_differ = torch.stack(differ).sum() if differ else None
        self.expert_load_LE = torch.stack([one.load_E for one in counted]) if counted else None
        self.indexer_kl = None if choice is None else choice.kl
        self.choices_differ = None if choice is None else choice.differ
        return self.norm(hidden_TD)
