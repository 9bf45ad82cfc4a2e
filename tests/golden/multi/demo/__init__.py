"""Shared: one package holds all of the project; every import inside it is relative."""
