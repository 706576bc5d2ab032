"""Seeing a run: logs, metrics, spans, health, the watchdog and the live view. Start with `process.py`."""
