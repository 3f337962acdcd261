"""Measurements as commands: each prints a table, and writes JSON with its raw data to bench-results/."""
