"""Activation checkpointing: `full` keeps only each block's input and runs the block again in the backward pass."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from orrery.manifest.schema import Trainer
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.memory.activation_checkpointing.kind == "full":
        for block in policy.network.layers:
            # On the instance's `forward`, not around the module: names stay, and FSDP's hooks stay outside of the recomputation.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
