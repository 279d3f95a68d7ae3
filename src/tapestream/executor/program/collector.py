"""Python's cycle collector, patient while a program is noted or run again."""

import contextlib
import gc
from collections.abc import Iterator

_TIMES = 10
"""An operation leaves about as many times the objects behind when it is noted as when it is not."""


@contextlib.contextmanager
def patient_collector() -> Iterator[None]:
    """Inside, the collector looks for cycles after as many operations as it would have without us.

    Notes live until backward, so to look through them finds nothing; and objects that have been looked at twice make
    Python look through all that the process has, a tenth of a second for PyTorch's own modules.
    """
    usual, *older = gc.get_threshold()
    patient = usual * _TIMES
    gc.set_threshold(patient, *older)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == patient:  # else the program has set its own
            gc.set_threshold(usual, *older)
