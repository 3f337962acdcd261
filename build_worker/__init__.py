"""Compiles engines for the hardware it runs on."""

from mesh import grpc_core  # noqa: F401 - before grpc is imported
