"""Any causal language model of transformers: `model.py` the network, `sharding.py` its placements, `weights.py` its names."""
