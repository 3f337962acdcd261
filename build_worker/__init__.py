"""Compiles engines for the hardware it runs on."""
