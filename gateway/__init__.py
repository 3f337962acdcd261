"""Routes token-streaming requests to workers and back."""

from mesh import grpc_core  # noqa: F401 - before grpc is imported
