"""Trainer: batches in, next weights out. `__main__` parses, `assemble` builds, `loop` is the algorithm."""
