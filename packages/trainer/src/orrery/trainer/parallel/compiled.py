"""torch.compile, one block at a time: blocks are alike, so one compilation serves all of a kind.

- A block is one graph without a break (`fullgraph`); its attention and its grouped products are operators of `orrery.kernels`.
- Where ranks exchange tokens or keys inside a block, the exchange stays outside of the graph, and a block is what stands around it.
- The first length of a micro-batch is compiled as it is, the second for every length to come.
"""

import torch

from orrery.manifest.schema import Mesh, Trainer
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


def is_whole(mesh: Mesh) -> bool:
    """Whether a block computes all by itself, so that it can be one graph."""
    return mesh.cp == mesh.ep == 1


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.compile:
        whole = is_whole(trainer.mesh) and policy.network.config.family != "hugging_face"
        for block in policy.network.layers:
            block.forward = torch.compile(block.forward, fullgraph=whole)
