"""Code of all processes of a run."""
