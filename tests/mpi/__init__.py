"""Trainings that mpirun starts."""
