"""What is known and kept of a program that has run: its record, restart checkpoints, tape."""
