"""Kernels: one folder an op, each with `reference.py` (the referee, the formula in plain torch) and the forms that must agree with it."""
