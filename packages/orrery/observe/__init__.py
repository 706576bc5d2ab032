"""Watch a run: hang detector, progress, metric sinks and the report."""
