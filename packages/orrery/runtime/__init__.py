"""What every process of a run shares. Start with `role_context.py`."""
