"""Activation checkpointing: the results of a block that stay for the backward pass.

`full` keeps each block's input. `selective` also keeps the results of named operations. `none`
keeps all that autograd saves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from orrery.kernels import (  # noqa: F401  (registers the operators named below)
    attention,
    grouped_matmul,
    wide_linear,
)
from orrery.manifest.schema import Model, Trainer
from orrery.trainer.parallel import compiled, recomputation
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy

SCALED_DOT_PRODUCT = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
)


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.memory.activation_checkpointing.kind == "none":
        return
    options = contexts(trainer, policy.network.config)
    has_graphs_inside = trainer.compile and not compiled.is_without_exchange(trainer.mesh)
    for block in policy.network.layers:
        run = block.forward
        if has_graphs_inside:
            run = partial(_call_without_views, run)
        # On `forward`, so that FSDP's hooks stay outside the recomputation.
        block.forward = partial(checkpoint, run, use_reentrant=False, **options)


def contexts(trainer: Trainer, model: Model) -> dict[str, Any]:
    """Return the keyword arguments of torch's `checkpoint` that select the kept operations.

    A block of one graph always gets them, or torch 2.11's partitioner keeps rows of experts.
    """
    kept = frozenset(operation for name in trainer.kept for operation in _operations(name))
    if trainer.compile and compiled.is_without_exchange(trainer.mesh):
        if kept or compiled.is_one_graph(trainer, model):
            return {"context_fn": partial(create_selective_checkpoint_contexts, keeping(kept))}
        return {}
    # Eager code, perhaps with graphs or FSDP hooks inside.
    if kept or trainer.mesh.ep > 1:
        return {"context_fn": partial(recomputation.contexts, kept, _called_by_graphs(trainer))}
    return {}


def _called_by_graphs(trainer: Trainer) -> frozenset[Any]:
    """Return the operations inside graphs: attention without cp, experts without ep."""
    if not trainer.compile:
        return frozenset()
    ranks = {"attention": trainer.mesh.cp, "experts": trainer.mesh.ep}
    names = [name for name, count in ranks.items() if count == 1]
    return frozenset(operation for name in names for operation in _operations(name))


def keeping(operations: frozenset[Any]) -> Callable[..., CheckpointPolicy]:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in operations:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _call_without_views(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def convert(value: Any) -> Any:
        return without_view(value) if isinstance(value, Tensor) else value

    return forward(*map(convert, args), **{name: convert(arg) for name, arg in kwargs.items()})


def without_view(x: Tensor) -> Tensor:
    """Return x as a base tensor (no view) in the same memory. Its gradient is x's.

    A graph inside a checkpoint must find no view in either run, or both trace different graphs.
    FSDP hands out views, activation offload does not.
    """
    return _WithoutView.apply(x) if x.requires_grad else x.detach()


class _WithoutView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _operations(name: str) -> list[Any]:
    aten, orrery = torch.ops.aten, torch.ops.orrery
    match name:
        case "attention":
            theirs = (getattr(aten, f"_scaled_dot_product_{kind}") for kind in SCALED_DOT_PRODUCT)
            ours = orrery.varlen_attention_forward
            return [ours.default, *(operation.default for operation in theirs)]
        case "projections":
            products = (aten.mm, aten.addmm, aten.linear, orrery.wide_linear)
            return [product.default for product in products]
        case "experts":
            return [orrery.grouped_matmul.default, orrery.adapted_grouped_matmul.default]
    raise AssertionError(f"the schema knows {name!r}, this file does not")
