"""Generate rollouts and send batches within the staleness bound. `loop.py` is the algorithm."""
