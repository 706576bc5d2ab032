"""Models: what a network is, on one device, and its weights as Hugging Face has them."""

from orrery.models.families import build, expert_modules, fsdp_units, hf_config

__all__ = ["build", "expert_modules", "fsdp_units", "hf_config"]
