"""Everything that crosses a process: columns, rollout wires, weight wires, rendezvous, checkpoints."""
