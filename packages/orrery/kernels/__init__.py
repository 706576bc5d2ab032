"""Kernels: one folder an op. Every backend must agree with its `reference.py` in plain torch."""
