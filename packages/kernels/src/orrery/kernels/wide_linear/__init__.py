"""A projection of half-precision operands with a float32 result and gradient: a router's logits.

    y_TN = x_TD · w_NDᵀ, accumulated in float32 and not rounded (float64 for float64 operands)

- `reference.py` converts the operands first. It also runs on a CPU. On a GPU it would not use
  tensor cores: some ten times slower, and different only in the order of sums.
- `dispatch.py` multiplies half-precision operands directly.
"""

from orrery.kernels.wide_linear.dispatch import wide_linear
from orrery.kernels.wide_linear.reference import wide_linear as reference_wide_linear

__all__ = ["reference_wide_linear", "wide_linear"]
