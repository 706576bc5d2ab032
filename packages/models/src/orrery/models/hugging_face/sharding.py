"""Placements of a network of transformers: its blocks are units, what is around them is the root's.

`orrery.models.sharding` says what the names mean.
"""

from orrery.models.sharding import FSDP_METHODS

FSDP_UNITS: tuple[tuple[str, ...], ...] = (("layers.*",),)
TIED_FSDP_UNITS = FSDP_UNITS
EXPERT_MODULES: tuple[str, ...] = ()

__all__ = ["EXPERT_MODULES", "FSDP_METHODS", "FSDP_UNITS", "TIED_FSDP_UNITS"]
