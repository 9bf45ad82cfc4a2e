"""The job script of `cluster=slurm`: with stand-ins for SLURM's commands, and with SLURM."""
