"""Plan a run's memory and time from its manifest, without torch."""
