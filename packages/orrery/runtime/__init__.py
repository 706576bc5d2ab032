"""Code that all processes of a run share. Start with `role_context.py`."""
