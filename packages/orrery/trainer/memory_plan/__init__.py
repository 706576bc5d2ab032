"""Memory plan: the bytes that a trainer rank needs, and the manifest fields that reduce them.

Formulas predict torch's allocated bytes, without fitted factors. The allocator reserves more.
"""
