"""What every process shares; imports no service."""
