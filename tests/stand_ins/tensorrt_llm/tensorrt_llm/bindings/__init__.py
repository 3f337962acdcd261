"""The C++ half."""
