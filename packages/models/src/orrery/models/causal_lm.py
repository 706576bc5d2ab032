"""What every family's network is: packed tokens to hidden states, and those to log-probs.

T tokens · D hidden · V vocabulary · L layers with experts · K experts a token

- One device is all that this code knows. `sharding.py` of the family says which modules are FSDP units; `trainer/parallel` applies it.
- The vocabulary is read twice: at the embedding and at the LM head (`log_probs`). A sharded weight is whole only inside the forward pass
  of the module that FSDP has wrapped around it: outside, `lm_head_weight` may be a shard.
- Parameters are unset (NaN) after construction: `orrery.models.weights` initialises or loads them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orrery.kernels.attention import Documents
from orrery.kernels.token_logprob import token_logprob
from orrery.kernels.token_logprob.chunked import ChunkTokens
from orrery.manifest.schema import Model
from orrery.models.attention import rotary_angles
from orrery.models.norm import RmsNorm


class LmHead(nn.Module):
    """Hidden states to log-probs and entropies, chunk by chunk; `weight` [V, D] in HF's orientation."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Tensor(vocab_size, hidden_size))

    def forward(
        self,
        hidden_TD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        chunk_tokens: ChunkTokens,
        keep_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        return token_logprob(
            hidden_TD, self.weight, target_T, temperature_T, chunk_tokens, keep_logits=keep_logits
        )

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return F.linear(hidden_TD.float(), self.weight.float())


class CausalLm(nn.Module):
    """Packed tokens to hidden states (`forward`), and those to log-probs and entropies of given tokens (`log_probs`).

    A family gives `layers`, `lm_head` (None where the embedding serves), `lm_head_weight` and `forward`.
    """

    layers: nn.ModuleList
    lm_head: Any
    num_routes_differ: Tensor | None = (
        None  # i64 []: choices replayed in the newest forward pass that are not the routers' own
    )

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, D]: the embedding itself where the manifest ties them."""
        raise NotImplementedError

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Tensor | None = None,
        routed_experts_TLK: Tensor | None = None,
        max_seqlen: int | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Final-norm hidden states [T, D] of packed documents, each attending only within itself.

        token_ids, positions i64 [T]; cu_seqlens i32 [n + 1] from 0 to T; routed_experts, integers [T, L, K], replays an engine's expert
        choices; where they are no experts' ids the routers choose. `max_seqlen`, the longest document, saves a device-to-host copy on a
        GPU. `documents` stands in for `cu_seqlens` and `max_seqlen` where the caller knows the packing better: a context-parallel rank.
        """
        raise NotImplementedError

    def compute_buffers(self) -> None:
        """Fill the buffers that no checkpoint holds, after they were given storage."""

    def drawn(self, parameter_name: str, seed: int, std: float) -> Tensor | None:
        """The family's own draw of a whole initial tensor, on the CPU; None where it has no other than `orrery.models.weights`."""
        return None

    def log_probs(
        self,
        hidden_TD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        chunk_tokens: ChunkTokens,
        keep_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of `target_T[t]` after row t of `forward`'s hidden states, and the entropy there: float32 [T] each; differentiable.

        target i64 [T], temperature f32 [T] > 0. The head is called as a module, not through its weight, wherever it is one: FSDP's hooks
        sit on module calls.
        """
        if self.lm_head is None:
            return token_logprob(
                hidden_TD,
                self.lm_head_weight,
                target_T,
                temperature_T,
                chunk_tokens,
                keep_logits=keep_logits,
            )
        return self.lm_head(hidden_TD, target_T, temperature_T, chunk_tokens, keep_logits)

    @torch.no_grad()
    def logits(self, token_ids_T: Tensor, positions_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """All logits [T, V] in float32: for tests and small inspections, never for training."""
        hidden_TD = self.forward(token_ids_T, positions_T, cu_seqlens)
        return (
            F.linear(hidden_TD.float(), self.lm_head_weight.float())
            if self.lm_head is None
            else self.lm_head.logits(hidden_TD)
        )


class Decoder(CausalLm):
    """Embedding, blocks in turn, final norm, LM head; `block` makes block i of the manifest's network."""

    def __init__(self, config: Model, block: Callable[[Model, int], nn.Module]) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block(config, index) for index in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None if config.tie_embeddings else LmHead(config.hidden_size, config.vocab_size)
        )

    @property
    def lm_head_weight(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Tensor | None = None,
        routed_experts_TLK: Tensor | None = None,
        max_seqlen: int | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        config = self.config
        hidden_TD = self.embed_tokens(token_ids_T)
        rotary_dim = int(config.head_dim * config.rotary_fraction)
        angles = rotary_angles(
            positions_T, rotary_dim, config.rope_theta, hidden_TD.dtype, config.rope_scaling
        )
        if documents is None:
            assert cu_seqlens is not None, "cu_seqlens or documents"
            documents = Documents(cu_seqlens, max_seqlen)
        differ = []
        first = config.num_layers if config.moe is None else config.moe.num_dense_layers
        for index, layer in enumerate(self.layers):
            if routed_experts_TLK is None or index < first:
                hidden_TD = layer(hidden_TD, angles, documents)
            else:
                hidden_TD, num_differing = layer(
                    hidden_TD, angles, documents, routed_experts_TLK[:, index - first]
                )
                differ.append(num_differing)
        self.num_routes_differ = torch.stack(differ).sum() if differ else None
        return self.norm(hidden_TD)
