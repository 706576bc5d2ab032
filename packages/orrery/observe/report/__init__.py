"""The report: one self-contained HTML page, made from a run directory alone."""
