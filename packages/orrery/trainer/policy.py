"""Join network and LM head in one `forward`, so that FSDP's hooks cover all weights.

T: tokens, M: scored tokens, D: hidden size
"""

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orrery.models.causal_lm import CausalLm
from orrery.trainer.micro_batch import MicroBatch

if TYPE_CHECKING:
    from orrery.trainer.parallel.fsdp import ComputeCopies


class Policy(nn.Module):
    """At most `chunk_tokens` tokens have logits at once, unless `keep_logits` keeps all logits."""

    def __init__(
        self, network: CausalLm, chunk_tokens: int | Literal["auto"], keep_logits: bool = False
    ):
        super().__init__()
        self.network, self.chunk_tokens, self.keep_logits = network, chunk_tokens, keep_logits
        self.copies: ComputeCopies | None = None  # replace FSDP's casts on one rank

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (log-prob f32 [M], entropy f32 [M]) at each token's temperature."""
        network = self.network
        hidden_TD = network(
            batch.token_id,
            batch.position,
            batch.cu_seqlens,
            batch.routed_experts,
            max_seqlen=batch.max_seqlen,
            engine_keys_TIB=batch.engine_keys,
            is_padding_T=batch.is_padding,
        )
        hidden_MD = _SelectRows.apply(hidden_TD, batch.row)
        return network.log_probs(
            hidden_MD, batch.target, batch.temperature, self.chunk_tokens, self.keep_logits
        )


class _SelectRows(torch.autograd.Function):
    """An `index_select` of distinct rows with a deterministic backward pass."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_M: Tensor) -> Tensor:
        ctx.save_for_backward(row_M)
        ctx.num_rows = x_TD.shape[0]
        return x_TD.index_select(0, row_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None]:
        (row_M,) = ctx.saved_tensors
        grad_TD = grad_MD.new_zeros(ctx.num_rows, grad_MD.shape[1])
        return grad_TD.index_copy_(0, row_M, grad_MD), None
