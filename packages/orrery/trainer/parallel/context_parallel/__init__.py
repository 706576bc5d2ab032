"""Context parallel: the cp ranks of a group share each micro-batch's tokens.

`apply` replaces `Attention.core`, and `shard` cuts a micro-batch. A scored token belongs to the
rank that predicts it. A kind (`trainer.mesh.cp_style`) is a core and its way to cut:

    ulysses   contiguous shares, and an all-to-all gives each rank all tokens of 1/cp of the heads
    ring      pieces r and 2·cp − 1 − r of each document, and keys and values pass around
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Mesh, Trainer
from orrery.models.layers import Attention
from orrery.trainer.micro_batch import MicroBatch
from orrery.trainer.parallel.context_parallel.ring import RingCore
from orrery.trainer.parallel.context_parallel.sharding import (
    TokenShard,
    contiguous,
    select_shard,
    zigzag,
)
from orrery.trainer.parallel.context_parallel.ulysses import UlyssesCore
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy

MakeCore = Callable[[dist.ProcessGroup], nn.Module]
MakeShard = Callable[[list[int], int, int], TokenShard]
KINDS: dict[str, tuple[MakeCore, MakeShard]] = {
    "ulysses": (UlyssesCore, contiguous),
    "ring": (RingCore, zigzag),
}


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.mesh.cp == 1:
        return
    attentions = [module for module in policy.network.modules() if isinstance(module, Attention)]
    if not attentions:
        family = policy.network.config.family
        raise OrreryError(
            f"trainer.mesh.cp {trainer.mesh.cp}: attention of family {family!r} cannot be spread; "
            "set trainer.mesh.cp to 1"
        )
    for attention in attentions:
        attention.core = KINDS[trainer.mesh.cp_style][0](world.group("cp"))


def watch(policy: Policy, observe: Callable[[Tensor], object]) -> None:
    """Call `observe` with each core's output. Its gradient is local to this rank."""
    for module in policy.modules():
        if isinstance(module, UlyssesCore | RingCore):
            module.watch = observe


def shard(batch: MicroBatch, world: World, mesh: Mesh) -> MicroBatch:
    if mesh.cp == 1:
        return batch
    lengths, rank = batch.cu_seqlens.diff().tolist(), world.axis_rank("cp")
    tokens = KINDS[mesh.cp_style][1](lengths, mesh.cp, rank)
    return select_shard(batch, tokens, is_first=rank == 0)
