"""Placements of GLM-4.5: `orrery.models.sharding` says what the names mean."""

from orrery.models.sharding import FSDP_UNITS, TIED_FSDP_UNITS

EXPERT_MODULES: tuple[str, ...] = ("layers.*.mlp.experts",)

__all__ = ["EXPERT_MODULES", "FSDP_UNITS", "TIED_FSDP_UNITS"]
