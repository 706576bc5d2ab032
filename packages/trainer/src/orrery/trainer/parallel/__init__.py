"""Parallelism from outside: model code is for one device; this file applies everything else, in the one order that works.

1. context parallel          not built; the manifest's schema refuses cp ≠ 1
2. expert parallel           not built; the same for ep
3. activation checkpointing  inside what is compiled
4. compile                   a block at a time, inside what is sharded
5. FSDP2                     last: its hooks must wrap all of the above

Each entry is `(policy, world, trainer) -> None` and changes the policy in place.
"""

from orrery.manifest.schema import Trainer
from orrery.trainer.parallel import activation_checkpointing, compiled, fsdp
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


def parallelize(policy: Policy, world: World, trainer: Trainer) -> None:
    activation_checkpointing.apply(policy, world, trainer)
    compiled.apply(policy, world, trainer)
    fsdp.apply(policy, world, trainer)
