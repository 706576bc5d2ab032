"""The LM head of a network of transformers, with whatever that network does to its logits (soft caps, scales, biases).

Logits are float32 whatever the compute dtype is, before anything is done to them, as in `orrery.kernels.token_logprob`.

T tokens · D hidden · V vocabulary
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from orrery.kernels.token_logprob import token_logprob
from orrery.kernels.token_logprob.chunked import ChunkTokens, auto_chunk_tokens, wide_matmul


class _Output:
    """A body's output whose only content is its final hidden states."""

    def __init__(self, hidden_NLD: Tensor) -> None:
        self.last_hidden_state = hidden_NLD

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Passed(nn.Module):
    """Stands in for the network's body: its final hidden states are what it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return self  # some networks ask a part of their body


class _Identity(nn.Identity):
    """Stands in for the network's head; some cast what they give it to the dtype of its weight."""

    weight = torch.empty(0)


class Head(nn.Module):
    """Hidden states to log-probs and entropies, chunk by chunk, under the interface of `LmHead`.

    Logits as they are go through `orrery.kernels.token_logprob`. Others are made by transformers' own `forward`, around which a body and
    a head stand that pass on what they get; such logits are whole for a chunk, and are made again in the backward pass.
    """

    def __init__(
        self, network: PreTrainedModel, body_name: str, head_name: str, embedding: nn.Module | None
    ) -> None:
        super().__init__()
        head = network.get_submodule(head_name)
        self._embedding = (
            embedding,
        )  # in a tuple, and so not a part: a tied head has no parameters of its own
        self.weight = head.weight if embedding is None else None
        self.bias = head.bias
        shell = copy.copy(network)
        shell._modules = {**network._modules, body_name: _Passed(), head_name: _Identity()}
        self._shell = (shell,)
        probe = torch.linspace(-300.0, 300.0, 8, device="cpu")
        with torch.device("cpu"), torch.no_grad():
            self.plain = self.bias is None and torch.equal(self._finished(probe[None]), probe[None])

    def forward(
        self,
        hidden_TD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        chunk_tokens: ChunkTokens,
        keep_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if self.plain:
            return token_logprob(
                hidden_TD,
                self._weight(),
                target_T,
                temperature_T,
                chunk_tokens,
                keep_logits=keep_logits,
            )
        if keep_logits:
            return self._chunk(hidden_TD, target_T, temperature_T)
        if chunk_tokens == "auto":
            chunk_tokens = auto_chunk_tokens(hidden_TD.device, self._weight().shape[0])
        rows = [x.split(chunk_tokens) for x in (hidden_TD, target_T, temperature_T)]
        chunks = [
            checkpoint(self._chunk, *chunk, use_reentrant=False)
            for chunk in zip(*rows, strict=True)
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, V] float32."""
        logits_TV = _Products.apply(hidden_TD, self._weight())
        return self._finished(logits_TV if self.bias is None else logits_TV + self.bias).float()

    def _chunk(
        self, hidden_TD: Tensor, target_T: Tensor, temperature_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprob_TV = (self.logits(hidden_TD) / temperature_T[:, None]).log_softmax(dim=-1)
        return logprob_TV.gather(1, target_T[:, None])[:, 0], -(logprob_TV.exp() * logprob_TV).sum(
            dim=-1
        )

    def _finished(self, logits_TV: Tensor) -> Tensor:
        return self._shell[0](inputs_embeds=logits_TV[None], use_cache=False).logits[0]

    def _weight(self) -> Tensor:
        embedding = self._embedding[0]
        return self.weight if embedding is None else embedding.weight


class _Products(torch.autograd.Function):
    """hidden · weightᵀ in float32 (float64 for float64); its gradient is rounded to the inputs' dtype."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD)
        return wide_matmul(hidden_TD, weight_VD.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits_TV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_TD, weight_VD = ctx.saved_tensors
        grad_TV, (wants_hidden, wants_weight) = (
            grad_logits_TV.to(hidden_TD.dtype),
            ctx.needs_input_grad,
        )
        return (
            grad_TV @ weight_VD if wants_hidden else None,
            grad_TV.T @ hidden_TD if wants_weight else None,
        )
