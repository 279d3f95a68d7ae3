"""Python's cycle collector, patient while a program is noted."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_TIMES = 10
"""An operation leaves about as many times the objects behind when it is noted as when it is not."""


class _Patience:
    """How many programs run now, and the thresholds from before the first of them and while they run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._usual: tuple[int, ...] = ()
        self._patient: tuple[int, ...] = ()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the collector looks for cycles after as many operations as it would have without us.

        Notes live until backward, so to look through them finds nothing; and objects that have been looked at twice
        make Python look through all that the process has, PyTorch's own modules included.
        """
        with self._lock:
            self._running += 1
            if self._running == 1:
                first, second, third = self._usual = gc.get_threshold()
                self._patient = first * _TIMES, second, third
                gc.set_threshold(*self._patient)
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running and gc.get_threshold() == self._patient:  # else the program has set its own
                    gc.set_threshold(*self._usual)


patient_collector = _Patience()
