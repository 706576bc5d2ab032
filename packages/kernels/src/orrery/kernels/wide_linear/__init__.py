"""A projection of half-precision operands whose result, and whose gradient on the way back, are float32: a router's logits.

    y_TN = x_TD · w_NDᵀ, accumulated in float32 and not rounded (float64 for float64 operands)

- `reference.py` converts the operands first: the referee, and what runs on a CPU. On a GPU that would be a product without tensor cores,
  some ten times slower for a result that differs in the order of sums alone.
- `operator.py` multiplies the operands as they are.
"""

from orrery.kernels.wide_linear.operator import wide_linear
from orrery.kernels.wide_linear.reference import wide_linear as reference_wide_linear

__all__ = ["reference_wide_linear", "wide_linear"]
