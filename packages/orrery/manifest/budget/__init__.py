"""The memory and time of a run, computed from its manifest before anything starts. No torch."""
