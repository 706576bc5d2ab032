"""Plan the memory and time of a run from its manifest, before it starts and without torch."""
