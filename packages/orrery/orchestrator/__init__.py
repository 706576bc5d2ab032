"""Keep engines and trainer busy and the data on-policy enough. `loop` is the algorithm."""
