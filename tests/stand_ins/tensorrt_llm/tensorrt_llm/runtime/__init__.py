"""The Python runtime."""
