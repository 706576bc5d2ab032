"""torch.compile, one block at a time: blocks are alike, so one compilation serves all; token counts vary, so shapes are dynamic.

Attention stays as it is: how a pack divides into documents is worked out on the host, which dynamo cannot trace.
"""

import torch

from orrery.manifest.schema import Trainer
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.compile:
        for block in policy.network.layers:
            block.self_attn.forward = torch.compiler.disable(block.self_attn.forward)
            block.compile(dynamic=True)
