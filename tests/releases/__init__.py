"""Releases of Python and of what a project depends on, oldest and newest."""
