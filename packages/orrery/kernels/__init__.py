"""Kernels, one module or folder per op. Every backend agrees with `reference_<function>`."""
