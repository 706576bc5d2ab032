"""Kernels: one module or folder an op. Every backend agrees with `reference_<function>`."""
