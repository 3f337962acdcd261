"""The `enginemesh` command."""
