"""Everything that crosses a process: columns, wires, rendezvous, checkpoints."""
