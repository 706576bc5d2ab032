"""Load DeepGEMM and multiply FP8 matrices on Hopper GPUs.

- `load` imports the package `deep_gemm`, else the copy in vLLM's wheel without importing vLLM.
- DeepGEMM compiles kernels at first use, with the host's nvcc.
"""

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from orrery.kernels.fp8.quantize import BLOCK, Quantized, RowGroups, group_of_rows

HOPPER = (9, 0)
BY_CHANNEL = (1, 1, BLOCK)  # recipe of 1 × 128 blocks on both sides


@cache
def load() -> ModuleType | None:
    """Return DeepGEMM, or None if it or a Hopper GPU is missing."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return None
    try:
        return importlib.import_module("deep_gemm")
    except ImportError:
        pass
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return None
    folder = Path(vllm.origin).parent / "third_party" / "deep_gemm"
    if not (folder / "__init__.py").is_file():
        return None
    # Register it as `deep_gemm`, because its submodules import that name.
    spec = importlib.util.spec_from_file_location(
        "deep_gemm", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["deep_gemm"] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, RuntimeError, AssertionError):  # built for another torch, or no nvcc
        del sys.modules["deep_gemm"]
        return None
    return module


def product(library: Any, x: Quantized, weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ [M, N]. x [M, K] has blocks 1 × 128, weight [N, K] 128 × 128."""
    out_MN = x.value.new_empty(x.value.shape[0], weight.value.shape[0], dtype=dtype)
    library.fp8_gemm_nt(tuple(x), tuple(weight), out_MN, disable_ue8m0_cast=True)
    return out_MN


def weight_gradient(library: Any, grad: Quantized, x: Quantized) -> Tensor:
    """Return gradᵀ · x [N, K] in float32, from `quantize`'s columns [N, M'] and [K, M']."""
    out_NK = grad.value.new_zeros(grad.value.shape[0], x.value.shape[0], dtype=torch.float32)
    sides = ((each.value, each.scale.T) for each in (grad, x))
    library.fp8_gemm_nt(*sides, out_NK, c=out_NK, recipe=BY_CHANNEL, disable_ue8m0_cast=True)
    return out_NK


def grouped_product(
    library: Any, x: Quantized, weight: Quantized, groups: RowGroups, dtype: torch.dtype
) -> Tensor:
    """Return rows of group e times weight[e] transposed. Padding is undefined."""
    num_rows = x.value.shape[0]
    out_MN = x.value.new_empty(num_rows, weight.value.shape[1], dtype=dtype)
    group_M = group_of_rows(groups, num_rows)
    library.m_grouped_fp8_gemm_nt_contiguous(
        tuple(x), tuple(weight), out_MN, group_M, disable_ue8m0_cast=True
    )
    return out_MN


def grouped_weight_gradient(
    library: Any, grad: Quantized, x: Quantized, groups: RowGroups, sides: tuple[int, int]
) -> Tensor:
    """Return [E, N, K] in float32 from the flat columns of both. Empty groups are zero."""
    num_groups = groups.ends_E.shape[0]
    out_ENK = grad.value.new_zeros(num_groups, *sides, dtype=torch.float32)
    length_E = torch.diff(groups.ends_E, prepend=groups.ends_E.new_zeros(1))
    # The host's sizes only choose tile shapes and are checked against the buffers.
    num_blocks = x.scale.shape[0]
    each, rest = divmod(num_blocks, num_groups)
    sizes = [(each + (e < rest)) * BLOCK for e in range(num_groups)]
    flat = ((part.value, part.scale.T) for part in (grad, x))
    library.k_grouped_fp8_gemm_nt_contiguous(*flat, out_ENK, sizes, length_E, c=out_ENK)
    return out_ENK
