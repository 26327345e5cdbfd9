"""Benchmarks: the cases, their timing, and the tables and figures made from the results."""
