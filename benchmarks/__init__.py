"""Measurements as commands: each prints a table, and writes JSON with its raw data to bench-results/."""

from mesh import grpc_core  # noqa: F401 - before grpc is imported
