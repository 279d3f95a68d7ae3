"""`Report`: what a call of a program did."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """The last call of a program. ``operations``: how many it made. ``stages``: its segments; ``recorded``: those whose
    saved tensors the first run kept. ``kept``: restart checkpoints of the first run. ``held_nbytes``: bytes of both.
    ``planned``: whether it followed a plan for this very sequence. ``reruns``: segments that run again.
    """

    operations: int
    stages: int
    recorded: int
    kept: int
    held_nbytes: int
    planned: bool
    reruns: int
