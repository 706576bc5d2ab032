"""One rank's weights in the dtype that computes, beside those that are trained: what FSDP's mixed precision is without its shards.

- Before a forward pass the copies are made, all at once, and stand in the modules; `put_back` puts the trained weights there again.
- A gradient goes to the trained weight, in its dtype, as soon as the backward pass has it: the copy's own is gone then. Micro-batches add
  up there, so bit for bit as FSDP does on one rank, without its buffers and its copies of a copy.
- Memory of the copies is given back with them; until then all are there (FSDP's `reshard_after_forward` false).
"""

from functools import partial

import torch
from torch import nn


class Copies:
    """Of a policy's weights that are of another dtype than `dtype`."""

    def __init__(self, policy: nn.Module, dtype: torch.dtype):
        self._pairs: dict[
            nn.Parameter, nn.Parameter
        ] = {}  # trained weight → copy; a tied weight has one
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._are_there = False
        for module in policy.modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight.dtype != dtype and weight.is_floating_point():
                    if weight not in self._pairs:
                        self._pairs[weight] = _copy_of(weight, dtype)
                    self._places.append((module, name, weight))
        policy.register_forward_pre_hook(self._make)

    @torch.no_grad()
    def _make(self, *_: object) -> None:
        if self._are_there:
            return
        for copy in self._pairs.values():
            copy.untyped_storage().resize_(copy.numel() * copy.itemsize)
        torch._foreach_copy_(list(self._pairs.values()), list(self._pairs))
        for module, name, weight in self._places:
            module._parameters[name] = self._pairs[weight]
        self._are_there = True

    def put_back(self) -> None:
        """After a pass, with a backward one or without."""
        if not self._are_there:
            return
        for module, name, weight in self._places:
            module._parameters[name] = weight
        for copy in self._pairs.values():
            copy.untyped_storage().resize_(0)
        self._are_there = False


def _copy_of(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=weight.requires_grad)
    copy.untyped_storage().resize_(0)
    if weight.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_hand_over, weight))
    return copy


def _hand_over(weight: nn.Parameter, copy: torch.Tensor) -> None:
    assert copy.grad is not None
    gradient, copy.grad = copy.grad, None
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad += gradient
