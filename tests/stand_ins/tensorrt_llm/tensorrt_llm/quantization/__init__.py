"""Quantisation."""
