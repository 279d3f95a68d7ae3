"""What the operating system decides: locks, files, memory, limits, signals. The one place that asks what there is.

Each module does the best that Linux has, and the same with what Python has everywhere where that is missing; what is
slower or missing then stands with the function. Nothing else in the package names ``fcntl``, ``/proc`` and the like.
"""
