"""Kernels, one module or folder per op. All backends agree with `reference_<function>`."""
