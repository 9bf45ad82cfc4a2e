"""Trainings on GPUs; `prerender.py` makes what they need, so that they run where torch is all."""
