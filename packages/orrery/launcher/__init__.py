"""Define the `orrery` command, and run a stage's processes."""
