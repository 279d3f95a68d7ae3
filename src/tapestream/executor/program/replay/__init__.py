"""Stretches of a recorded program run again."""
