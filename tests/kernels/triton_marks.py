"""Marks of tests that run Triton's kernels: on a GPU, or on a CPU in Triton's interpreter."""

import os
from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1 with triton installed",
)
TRITON = pytest.param("triton", marks=NEEDS_TRITON)
