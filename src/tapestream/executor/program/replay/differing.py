"""What is said of an operation that gave something else when it ran again."""

from collections.abc import Sequence

import torch

from tapestream.errors import GradientError
from tapestream.executor.program.record.record import Record
from tapestream.runner.counts import digest_of


def as_before(record: Record, k: int, made: Sequence[torch.Tensor]) -> None:
    """Raise GradientError where operation ``k`` did not make the very bits of the first run."""
    if record.digests is not None and record.digests[k] != digest_of(made):
        raise changed(record, k, "other numbers")


def changed(record: Record, k: int, how: str) -> GradientError:
    """A replay gave something else than the first run."""
    return GradientError(
        f"Program: {name_of(record, k)} gave {how} in a replay; its result must depend only on its arguments and "
        "torch's global random generator"
    )


def name_of(record: Record, k: int) -> str:
    """What to call operation ``k`` in messages."""
    function = record.pattern(k).function
    return f"operation {k} ({getattr(function, '__name__', function)})"
