"""Placements of Qwen3, dense: `orrery.models.sharding` says what the names mean."""

from orrery.models.sharding import FSDP_UNITS, TIED_FSDP_UNITS

EXPERT_MODULES: tuple[str, ...] = ()

__all__ = ["EXPERT_MODULES", "FSDP_UNITS", "TIED_FSDP_UNITS"]
