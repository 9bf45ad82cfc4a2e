"""The job script of `cluster=slurm`: with commands that stand in for SLURM's, and with SLURM itself."""
