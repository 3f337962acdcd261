"""Runs one engine and streams its tokens."""
