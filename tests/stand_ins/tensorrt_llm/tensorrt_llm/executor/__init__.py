"""Requests and results of LLM."""
