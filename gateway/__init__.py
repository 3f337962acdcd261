"""Routes token-streaming requests to workers and back."""
