"""One matrix product a group of rows: the experts of a mixture.

out[rows of group e] = x[rows of group e] @ weight[e]ᵀ
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
