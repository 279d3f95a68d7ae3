"""Planners that made no plan faster where it was tried (`benchmarks/ablation.py`): by name only, one paper a file.

`tapestream.planners.planners` knows them by name, as all others. "auto" and `joint` do not try them.
"""
