"""The report: one self-contained HTML page about a run, made from its run directory alone."""
