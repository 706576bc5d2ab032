"""One matrix product a group of rows: the experts of a mixture.

    out[rows of group e] = x[rows of group e] @ weight[e]ᵀ

- `reference.py` loops over the groups: the referee, and what runs on a CPU.
- `fused.py` is torch's grouped GEMM: bfloat16 on a GPU.
"""

from orrery.kernels.grouped_matmul.fused import grouped_matmul
from orrery.kernels.grouped_matmul.reference import grouped_matmul as reference_grouped_matmul

__all__ = ["grouped_matmul", "reference_grouped_matmul"]
