"""Memory plan: the bytes that a trainer rank needs, and the manifest fields that reduce them.

- `sizes.py`: bytes of a block's activations; parameters by FSDP unit.
- `plan.py`: bytes by category at every moment of a step. The fullest moment is the peak.
- `options.py`: manifest changes that free memory, with their costs, and which to choose.
- `out_of_memory.py`: errors and warnings that name the fields to change.

Formulas follow the code's allocations, without fitted factors. They predict the bytes that torch
counts as allocated; the allocator reserves more. `benchmarks/trainer/` compares them with runs.
"""
