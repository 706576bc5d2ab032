"""One matrix product a group of rows: the experts of a mixture.

    out[rows of group e] = x[rows of group e] @ weight[e]ᵀ

- `reference.py`: a loop over the groups with plain autograd.
- `dispatch.py`: the operator `orrery::grouped_matmul` and its gradients. torch's grouped GEMM in
  bfloat16 on a GPU, without a host sync; a loop elsewhere.
- `adapted.py`: the product with LoRA adapters, `orrery::adapted_grouped_matmul`.
- `low_rank.py`: Triton kernels for the adapters' part.
"""

from orrery.kernels.grouped_matmul.adapted import adapted_grouped_matmul
from orrery.kernels.grouped_matmul.dispatch import grouped_matmul, reserve_multiprocessors
from orrery.kernels.grouped_matmul.reference import grouped_matmul as reference_grouped_matmul

__all__ = [
    "adapted_grouped_matmul",
    "grouped_matmul",
    "reference_grouped_matmul",
    "reserve_multiprocessors",
]
