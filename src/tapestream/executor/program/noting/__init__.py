"""A program while it runs: every call is noted."""
