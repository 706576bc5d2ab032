"""The `orrery` command, and the launcher of a stage's processes (`supervisor.py`)."""
