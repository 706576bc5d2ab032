"""Keep engines and trainer busy, and the training data on-policy enough. `loop` is the algorithm."""
