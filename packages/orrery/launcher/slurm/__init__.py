"""Run a stage as a Slurm job."""
