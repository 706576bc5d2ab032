"""Slurm: its queue, the job that a stage asks for, and the steps that run inside that job."""
