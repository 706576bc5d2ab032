"""One matrix product a group of rows: the experts of a mixture.

    out[rows of group e] = x[rows of group e] @ weight[e]ᵀ

- `reference.py` loops over the groups with plain autograd: the referee.
- `operators.py` is the op, `orrery::grouped_matmul`, and the product of its weight's gradient: torch's grouped GEMM in bfloat16 on a
  GPU, without a host sync; a loop elsewhere. torch.compile leaves both whole.
- `adapted.py` is the product with adapters in it, `orrery::adapted_grouped_matmul`; `low_rank.py` is what they add, in Triton.
- `multiprocessors.py` keeps the GEMM off those that collectives hold.
"""

from orrery.kernels.grouped_matmul.adapted import adapted_grouped_matmul
from orrery.kernels.grouped_matmul.multiprocessors import leave_multiprocessors
from orrery.kernels.grouped_matmul.operators import grouped_matmul
from orrery.kernels.grouped_matmul.reference import grouped_matmul as reference_grouped_matmul

__all__ = [
    "adapted_grouped_matmul",
    "grouped_matmul",
    "leave_multiprocessors",
    "reference_grouped_matmul",
]
