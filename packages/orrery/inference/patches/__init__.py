"""Patch upstream libraries. `registry` lists and applies all patches."""
