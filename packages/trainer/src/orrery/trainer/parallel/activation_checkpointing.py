"""Activation checkpointing: what of a block's forward pass stays for the backward pass, and what is computed again.

- `full` keeps only each block's input.
- `selective` keeps the input and the results of the named operations; all else, which costs bytes and no matrix products, is made again.
- Where a block is compiled inside of what is checkpointed, both runs must find the same graphs, or what they keep for the backward pass
  does not match. So neither sees a view (`anew`): FSDP hands out views, what comes back from activation offload is none, and a graph of
  symbolic lengths that was traced with a view asks for its base.
- `none` keeps what autograd asks for. Compiled, that is less than it sounds: the compiler makes cheap results again by itself.
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

from orrery.kernels import attention, grouped_matmul, wide_linear  # noqa: F401  (they register the operators that are named below)
from orrery.manifest.schema import Model, Trainer
from orrery.trainer.parallel import compiled, recomputation
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.memory.activation_checkpointing.kind == "none":
        return
    options = contexts(trainer, policy.network.config)
    for block in policy.network.layers:
        run = (
            partial(_on_no_views, block.forward)
            if trainer.compile and not compiled.is_whole(trainer.mesh)
            else block.forward
        )
        # On the instance's `forward`, not around the module: names stay, and FSDP's hooks stay outside of the recomputation.
        block.forward = partial(checkpoint, run, use_reentrant=False, **options)


def contexts(trainer: Trainer, model: Model) -> dict[str, Any]:
    """What torch's `checkpoint` is to be told of the operations whose results stay.

    Of a block that is compiled as one graph, also that none do: left to itself the partitioner of torch 2.11 keeps rows of experts.
    """
    kept = frozenset(operation for name in trainer.kept for operation in _operations(name))
    if trainer.compile and compiled.is_whole(trainer.mesh):
        if kept or compiled.is_one_graph(trainer, model):
            return {"context_fn": partial(create_selective_checkpoint_contexts, keeping(kept))}
        return {}
    # A graph of autograd alone, perhaps with compiled parts, or the hooks of its experts' FSDP unit, inside.
    if kept or trainer.mesh.ep > 1:
        return {"context_fn": partial(recomputation.contexts, kept, _called_by_compiled(trainer))}
    return {}


def _called_by_compiled(trainer: Trainer) -> frozenset[Any]:
    """Of a block that is compiled around its exchanges, operations that stand in none: attention is in cp's, experts are in ep's."""
    if not trainer.compile:
        return frozenset()
    outside = [
        name
        for name, ranks in (("attention", trainer.mesh.cp), ("experts", trainer.mesh.ep))
        if ranks == 1
    ]
    return frozenset(operation for name in outside for operation in _operations(name))


def keeping(operations: frozenset[Any]) -> Callable[..., CheckpointPolicy]:
    """The policy that keeps the results of `operations` and recomputes the rest."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if operation in operations
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return policy


def _on_no_views(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = (anew(arg) if isinstance(arg, Tensor) else arg for arg in args)
    return forward(
        *given,
        **{name: anew(arg) if isinstance(arg, Tensor) else arg for name, arg in kwargs.items()},
    )


def anew(x: Tensor) -> Tensor:
    """x as a tensor that is no view of another, of the same memory; its gradient is x's."""
    return _Anew.apply(x) if x.requires_grad else x.detach()


class _Anew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _operations(name: str) -> list[Any]:
    aten, orrery = torch.ops.aten, torch.ops.orrery
    match name:
        case "attention":  # ours, and those that torch chooses from for a network of transformers
            theirs = (
                "flash_attention",
                "flash_attention_for_cpu",
                "efficient_attention",
                "cudnn_attention",
            )
            return [
                orrery.varlen_attention_forward.default,
                *(getattr(aten, f"_scaled_dot_product_{name}").default for name in theirs),
            ]
        case "projections":
            return [
                aten.mm.default,
                aten.addmm.default,
                aten.linear.default,
                orrery.wide_linear.default,
            ]
        case "experts":
            return [orrery.grouped_matmul.default, orrery.adapted_grouped_matmul.default]
    raise AssertionError(f"the schema knows {name!r}, this file does not")
