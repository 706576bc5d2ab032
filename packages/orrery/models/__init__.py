"""Networks on one device, and their weights in Hugging Face's format."""

from orrery.models.families import build, expert_modules, fsdp_units, hf_config

__all__ = ["build", "expert_modules", "fsdp_units", "hf_config"]
