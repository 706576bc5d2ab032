"""Corrections to other projects that cross processes, one file a project."""
