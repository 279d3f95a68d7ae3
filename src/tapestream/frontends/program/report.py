"""`Report`: what a call of a program did."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """The last call: its operations, stretches, those recorded in the first sweep, restart checkpoints kept in it, and
    the bytes of both; whether a plan for this very sequence was followed; the stretches that backward runs again."""

    operations: int
    stages: int
    recorded: int
    kept: int
    held_nbytes: int
    planned: bool
    reruns: int
