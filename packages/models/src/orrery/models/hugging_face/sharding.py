"""Placements of a network of transformers: its blocks are units, what is around them is the root's.

`orrery.models.sharding` says what the names mean.
"""

FSDP_UNITS: tuple[tuple[str, ...], ...] = (("layers.*",),)
TIED_FSDP_UNITS = FSDP_UNITS
EXPERT_MODULES: tuple[str, ...] = ()
