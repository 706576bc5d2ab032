"""Define the `orrery` command, and run stages."""
