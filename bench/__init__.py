"""Measurements: what is timed, against what, and how the results become the tables of the README."""
