"""Obeys the schedule of a loop of any length, without a Python object per step."""
