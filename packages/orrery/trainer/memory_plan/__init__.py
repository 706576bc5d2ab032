"""Memory plan: the bytes that a trainer rank needs, and the manifest fields that reduce them.

Formulas follow the code's allocations, without fitted factors. They predict the bytes that torch
counts as allocated. The allocator reserves more.
"""
