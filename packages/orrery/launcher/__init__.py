"""The `orrery` command, and the launcher, which starts and watches a stage's processes."""
