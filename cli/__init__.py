"""The `enginemesh` command."""

from mesh import grpc_core  # noqa: F401 - before grpc is imported
