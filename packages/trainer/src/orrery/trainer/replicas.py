"""Replicas (HSDP): ranks that hold copies of the same shards, which every step changes alike, or something is broken.

A copy that came apart would train on unseen: gradients are summed over replicas, and only the first replica's weights are stored and
published. So before a checkpoint is copied, each rank's shards are summed up bit by bit, and ranks of one place compare.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from orrery.manifest.errors import RunFailed
from orrery.models.placement import local_tensor
from orrery.trainer.parallel.world import World

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(weights: Iterable[Tensor], world: World, step: int) -> None:
    """Raises RunFailed, on every rank, where two ranks that hold the same shards differ in a bit. A collective where there are replicas."""
    count = world.axis_size("dp_replicate")
    if count == 1:
        return
    prints, places = world.each(fingerprint(weights)), world.size // count
    for rank, found in enumerate(prints[places:], places):
        if found != prints[rank % places]:
            raise RunFailed(
                f"step {step}: the weights of rank {rank} are not those of rank {rank % places}, of which they are a copy (dp_replicate "
                f"{count}); nothing is stored of this step: check the devices of both, and start again from the checkpoint before it"
            )


@torch.no_grad()
def fingerprint(weights: Iterable[Tensor]) -> int:
    """Of the bits of all local shards: each weight's words are summed, and the sums mixed in order. One pass over memory."""
    sums = []
    for weight in weights:
        shard = local_tensor(weight.detach())
        sums.append(shard.contiguous().view(-1).view(_WORDS[shard.itemsize]).sum(dtype=torch.int64))
    mixed = 0
    for value in (
        torch.stack([one.cpu() if one.device != sums[0].device else one for one in sums]).tolist()
        if sums
        else ()
    ):
        mixed = (mixed * 1_000_003 + value) % (2**61 - 1)
    return mixed
