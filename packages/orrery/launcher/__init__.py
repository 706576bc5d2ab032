"""Run the `orrery` command. `supervisor.py` starts, watches and ends a stage's processes."""
