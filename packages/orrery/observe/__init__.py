"""Hang detector, progress, metric sinks and report of a run."""
