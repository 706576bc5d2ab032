"""Generate rollouts and send training batches. `loop.py` is the algorithm."""
