"""Runs one engine and streams its tokens."""

from mesh import grpc_core  # noqa: F401 - before grpc is imported
