"""Starting, watching and ending the processes of a run on one machine, and the `orrery` command. Start with `supervisor.py`."""
