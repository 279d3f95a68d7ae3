"""Runs one stage at a time: guards, RNG, buffers, autocast, tapes. Knows nothing of schedules."""
