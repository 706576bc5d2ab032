"""The LM head of a transformers network, with its soft caps, scales and biases.

T tokens · D hidden · V vocabulary
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from orrery.kernels.token_logprob import ChunkTokens, auto_chunk_tokens, token_logprob, wide_matmul


class _BodyOutput:
    def __init__(self, hidden_NLD: Tensor) -> None:
        self.last_hidden_state = hidden_NLD

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _PassthroughBody(nn.Module):
    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return self  # some networks read parts of their body


class _PassthroughHead(nn.Identity):
    """Identity. Some networks cast the head's input to its weight's dtype."""

    weight = torch.empty(0)


class Head(nn.Module):
    """Hidden states to log-probs and entropies, with the interface of `LmHead`.

    Logits are float32. Changed logits go through transformers' own `forward` around a passthrough
    body and head, as whole chunks, recomputed in the backward pass.
    """

    def __init__(
        self, network: PreTrainedModel, body_name: str, head_name: str, embedding: nn.Module | None
    ) -> None:
        super().__init__()
        head = network.get_submodule(head_name)
        self._embedding = (embedding,)  # in a tuple, so not a submodule
        self.weight = head.weight if embedding is None else None
        self.bias = head.bias
        shell = copy.copy(network)
        replaced = {body_name: _PassthroughBody(), head_name: _PassthroughHead()}
        shell._modules = {**network._modules, **replaced}
        self._shell = (shell,)
        probe = torch.linspace(-300.0, 300.0, 8, device="cpu")[None]
        with torch.device("cpu"), torch.no_grad():
            self.is_plain = self.bias is None and torch.equal(self._transform(probe), probe)

    def forward(
        self,
        hidden_TD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        chunk_tokens: ChunkTokens,
        keep_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        rows, weight_VD = (target_T, temperature_T), self.head_weight()
        if self.is_plain:
            return token_logprob(hidden_TD, weight_VD, *rows, chunk_tokens, keep_logits=keep_logits)
        if keep_logits:
            return self._chunk(hidden_TD, *rows)
        if chunk_tokens == "auto":
            chunk_tokens = auto_chunk_tokens(hidden_TD.device, weight_VD.shape[0])
        chunks = zip(*(x.split(chunk_tokens) for x in (hidden_TD, *rows)), strict=True)
        results = [checkpoint(self._chunk, *chunk, use_reentrant=False) for chunk in chunks]
        logprobs, entropies = zip(*results, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        logits_TV = _WideLinear.apply(hidden_TD, self.head_weight())
        return self._transform(logits_TV if self.bias is None else logits_TV + self.bias).float()

    def head_weight(self) -> Tensor:
        embedding = self._embedding[0]
        return self.weight if embedding is None else embedding.weight

    def _chunk(
        self, hidden_TD: Tensor, target_T: Tensor, temperature_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprob_TV = (self.logits(hidden_TD) / temperature_T[:, None]).log_softmax(dim=-1)
        entropy_T = -(logprob_TV.exp() * logprob_TV).sum(dim=-1)
        return logprob_TV.gather(1, target_T[:, None])[:, 0], entropy_T

    def _transform(self, logits_TV: Tensor) -> Tensor:
        return self._shell[0](inputs_embeds=logits_TV[None], use_cache=False).logits[0]


class _WideLinear(torch.autograd.Function):
    """hidden · weightᵀ in float32 (float64 for float64). Gradients have the inputs' dtype."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD)
        return wide_matmul(hidden_TD, weight_VD.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits_TV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_TD, weight_VD = ctx.saved_tensors
        grad_TV = grad_logits_TV.to(hidden_TD.dtype)
        wants_hidden, wants_weight = ctx.needs_input_grad
        grad_hidden_TD = grad_TV @ weight_VD if wants_hidden else None
        return grad_hidden_TD, grad_TV.T @ hidden_TD if wants_weight else None
