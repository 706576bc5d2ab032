"""Code of all processes of a run. Start with `role_context.py`."""
