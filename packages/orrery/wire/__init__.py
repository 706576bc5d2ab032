"""Pass batches, weights, addresses and checkpoints between processes."""
