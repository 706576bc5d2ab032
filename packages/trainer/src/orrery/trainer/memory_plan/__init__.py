"""Memory plan: the bytes that a trainer rank needs, before it runs; and when one runs out, which field of the manifest to change.

- `kept.py`: what a block of the network leaves for its backward pass, and what passes through memory when that runs.
- `sizes.py`: parameters by unit of FSDP, counted on the network itself, built without storage.
- `plan.py`: a step's moments, in each the bytes by category; the fullest is what a rank must have.
- `levers.py`: changes of the manifest that free memory, each with what it costs, and which of them to pull.
- `out_of_memory.py`: torch's error as the sentence that people read.

Formulas follow what the code allocates, and hold for bytes that torch counts as allocated; measurements have shown what they had left out,
and no factor is fitted. The allocator reserves more (6 to 25 % on an H200 with expandable segments), and gives most of it back before it
fails. Seventeen of the levers' 22 runs on two devices are within 0.1 % and the rest within 1.1 % (`benchmarks/trainer/levers.py`). Of 19
others three are beyond 2.3 %: a model recomputed whole, of which gradients fill the device, needs 6.6 % more than its plan; a mixture
over `cp` 6 % less; and one whose experts' adapters were made again, before those were one operator, 7 % less.
"""
