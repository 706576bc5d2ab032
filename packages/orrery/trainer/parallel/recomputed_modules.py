"""Run named modules of a block again in the backward pass (`ModuleCheckpointing`).

Calls of these modules run under torch's `checkpoint`, which keeps only inputs. Hooks prevent later
operations from saving the modules' results. A block compiled to one graph needs no hooks.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from orrery.manifest.schema import Trainer
from orrery.models.causal_lm import TransformerBlock
from orrery.models.latent_attention import LatentAttention
from orrery.models.layers import Attention, Experts, Router
from orrery.trainer.parallel import blocks
from orrery.trainer.policy import Policy


def apply(policy: Policy, trainer: Trainer) -> None:
    is_one_graph = trainer.compile and not trainer.mesh.has_exchange
    for index, block in enumerate(policy.network.layers):
        names = trainer.memory.recomputed_modules(index)
        if not names:
            continue
        calls = _Calls(block.forward)
        for name, module, method in _methods(block):
            if name in names:
                setattr(module, method, partial(calls.run, getattr(module, method)))
        if not is_one_graph:
            block.forward = calls.run_block


def _methods(block: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name in the manifest, module, method) of each recomputable method."""
    for module in block.modules():
        match module:
            case TransformerBlock():
                yield "norms", module.input_layernorm, "forward"
                yield "norms", module.post_attention_layernorm, "forward"
            case Attention():
                yield "attention_projections", module, "project_heads"
            case LatentAttention():
                for method in ("project_queries", "absorb", "expand"):
                    yield "attention_projections", module, method
            case Router():
                yield "router", module, "forward"
            case Experts():
                yield "experts_activation", module, "activate"


class _Calls:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._results: dict[int, Tensor] = {}  # by storage address, during the forward pass

    def run_block(self, *args: Any, **kwargs: Any) -> Any:
        pack, unpack = blocks.storage_of_results()

        def hold(tensor: Tensor) -> partial:
            result = self._results.get(tensor.untyped_storage().data_ptr())
            if result is None:
                return partial(unpack, pack(tensor))
            offset = tensor.storage_offset() - result.storage_offset()
            return partial(_recompute, result.grad_fn, tensor.shape, tensor.stride(), offset)

        try:
            with saved_tensors_hooks(hold, lambda held: held()):
                return self._forward(*args, **kwargs)
        finally:
            self._results.clear()

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(call, *args, use_reentrant=False)
        options = {"use_reentrant": False, "preserve_rng_state": False}
        results = checkpoint(_save_results, call, *args, **options)
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.grad_fn is not None and result.numel():
                self._results[result.untyped_storage().data_ptr()] = result
        return results


def _save_results(call: Callable[..., Any], *args: Any) -> Any:
    return tree_map_only(Tensor, lambda x: _Saved.apply(x) if x.requires_grad else x, call(*args))


class _Saved(torch.autograd.Function):
    """Identity that saves x. The backward pass caches x in `ctx.recomputed`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.recomputed = None
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.recomputed = None
        return grad


def _recompute(node: Any, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    if node.recomputed is None:  # cached, because `saved_tensors` is readable only once
        (node.recomputed,) = node.saved_tensors
    result = node.recomputed
    return result.as_strided(shape, stride, result.storage_offset() + offset)
