"""Llama: `model.py` the network, `sharding.py` its placements, `weights.py` its names at Hugging Face."""
