"""The manifest of a run."""
