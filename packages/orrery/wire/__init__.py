"""Pass data between processes: columns, wires, rendezvous, checkpoints."""
