"""The policy as the trainer runs it: network and LM head behind one `forward`, so that FSDP's hooks see every use of every weight."""

import torch
from torch import nn

from orrery.kernels.token_logprob import token_logprob
from orrery.models.causal_lm import CausalLm
from orrery.trainer.micro_batch import MicroBatch


class Policy(nn.Module):
    """`network` maps tokens to hidden states (orrery.models); at most `chunk_tokens` rows of logits exist at a time."""

    def __init__(self, network: CausalLm, chunk_tokens: int):
        super().__init__()
        self.network, self.chunk_tokens = network, chunk_tokens

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob f32 [M], entropy f32 [M]) of the scored tokens, of the distribution at the sample's temperature.

        The head is called as a module, not through its weight, wherever it is one: FSDP's hooks sit on module calls.
        """
        network = self.network
        hidden = network(batch.token_id, batch.position, batch.cu_seqlens, max_seqlen=batch.max_seqlen).index_select(0, batch.row)
        if network.lm_head is None:
            return token_logprob(hidden, network.lm_head_weight, batch.target, batch.temperature, self.chunk_tokens)
        return network.lm_head(hidden, batch.target, batch.temperature, self.chunk_tokens)
