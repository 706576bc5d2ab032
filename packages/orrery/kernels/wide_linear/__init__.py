"""A projection of half-precision operands with a float32 result and gradient: a router's logits.

    y_TN = x_TD · w_NDᵀ, accumulated in float32 and not rounded (float64 for float64 operands)

`reference.py` converts the operands and runs on a CPU. `dispatch.py` multiplies half-precision
operands directly, on a GPU's tensor cores.
"""

from orrery.kernels.wide_linear.dispatch import wide_linear
from orrery.kernels.wide_linear.reference import wide_linear as reference_wide_linear

__all__ = ["reference_wide_linear", "wide_linear"]
