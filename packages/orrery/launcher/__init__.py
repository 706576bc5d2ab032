"""Start, watch and end the processes of a run, and the `orrery` command (see `supervisor.py`)."""
