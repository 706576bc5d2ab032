"""Slurm: its queue, a stage's job, and the steps inside that job."""
