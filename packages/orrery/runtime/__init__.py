"""Code that all processes of a run share."""
