"""Context parallel: the cp ranks of a group share each micro-batch's tokens; attention is where they meet.

- Applied from outside: `Attention.core` is replaced. All else of the network sees this rank's tokens with their true positions.
- `shard` cuts a micro-batch, which every rank of the group has whole, on the host. A scored token belongs to the rank that has the row
  which it is predicted from; the loss is a sum over scored tokens with global counts, so no log-prob is ever gathered.
- Kinds (`trainer.mesh.cp_style`), each a way to cut (`cut.py`) and a core that goes with it:
      ulysses   contiguous shares of the packed stream; an all-to-all gives each rank all tokens of 1/cp of the heads, and back
      ring      of every document pieces r and 2·cp − 1 − r; keys and values travel around
- The cores stay out of compiled graphs.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Mesh, Trainer
from orrery.models.layers import Attention
from orrery.trainer.micro_batch import MicroBatch
from orrery.trainer.parallel.context_parallel import cut
from orrery.trainer.parallel.context_parallel.ring import RingCore
from orrery.trainer.parallel.context_parallel.ulysses import UlyssesCore
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy

KINDS: dict[
    str, tuple[Callable[[dist.ProcessGroup], nn.Module], Callable[[list[int], int, int], cut.Cut]]
] = {
    "ulysses": (UlyssesCore, cut.contiguous),
    "ring": (RingCore, cut.zigzag),
}


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.mesh.cp == 1:
        return
    attentions = [module for module in policy.network.modules() if isinstance(module, Attention)]
    if not attentions:
        family = policy.network.config.family
        raise OrreryError(
            f"trainer.mesh.cp {trainer.mesh.cp}: attention of family {family!r} cannot be spread; set trainer.mesh.cp to 1"
        )
    for attention in attentions:
        attention.core = KINDS[trainer.mesh.cp_style][0](world.group("cp"))


def watch(policy: Policy, see: Callable[[Tensor], object]) -> None:
    """`see` is given what leaves each core: its gradient is this rank's own, and what the core makes of it is every rank's of the group."""
    for module in policy.modules():
        if isinstance(module, UlyssesCore | RingCore):
            module.watch = see


def shard(batch: MicroBatch, world: World, mesh: Mesh) -> MicroBatch:
    """This rank's part of `batch`, which must be on the CPU; all of it where cp is 1."""
    if mesh.cp == 1:
        return batch
    lengths = batch.cu_seqlens.diff().tolist()
    return cut.take(
        batch,
        KINDS[mesh.cp_style][1](lengths, mesh.cp, world.axis_rank("cp")),
        is_first=world.axis_rank("cp") == 0,
    )
