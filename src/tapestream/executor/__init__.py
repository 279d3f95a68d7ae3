"""Obeys a Schedule: the interpreter, what it moves, and the copy engines."""
