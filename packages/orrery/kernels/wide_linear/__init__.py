"""A router's logits: half-precision operands, float32 result and gradient.

y_TN = x_TD · w_NDᵀ, accumulated in float32 and not rounded (float64 for float64 operands)
"""

from orrery.kernels.wide_linear.dispatch import wide_linear
from orrery.kernels.wide_linear.reference import wide_linear as reference_wide_linear

__all__ = ["reference_wide_linear", "wide_linear"]
