"""Kernels, one module or folder per op. All backends agree with `reference_<function>`."""

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
