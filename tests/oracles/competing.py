"""The planners that "auto" and `joint` promise to be no slower than: all but those that are tried by name alone."""

from tapestream.planners import planners

COMPETING = [name for name, plan in planners.items() if ".classic." not in plan.__module__]
