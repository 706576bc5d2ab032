"""Corrections to upstreams: one file each, applied by explicit calls, every one with the condition for its removal."""
