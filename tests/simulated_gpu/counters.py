"""What the device counts, and who makes the host wait for it."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .library import LISTENER, Counter, Knob, Library


@dataclass(frozen=True)
class Synchronisation:
    """The host waited for the device, or may have had to: which operator or call asked, and from where."""

    who: str
    stack: str

    def __str__(self) -> str:
        return f"{self.who}\n{self.stack}"


class Counters:
    """Numbers since the process began."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._open: list[list[Synchronisation]] = []
        self._listener = LISTENER(self._heard)  # kept: the library calls it
        library.listen(self._listener)

    def numbers(self) -> dict[str, int]:
        """Jobs issued, synchronisations, copies by direction, microseconds that the host was blocked."""
        return {counter.name.lower(): self._library.counter(counter) for counter in Counter}

    def synchronisations(self) -> dict[str, int]:
        """How often each operator or call made the host wait."""
        lines = self._library.synchronisations().decode().splitlines()
        return {name: int(times) for name, times in (line.split("\t") for line in lines)}

    @contextmanager
    def host_synchronisations(self) -> Iterator[list[Synchronisation]]:
        """Lists those of a block, of all threads: ``with ... as found: step()``; ``assert not found``."""
        found: list[Synchronisation] = []
        self._open.append(found)
        self._library.set_knob(Knob.EXPLAIN, 1)
        try:
            yield found
        finally:
            self._open.remove(found)
            self._library.set_knob(Knob.EXPLAIN, int(bool(self._open)))

    def _heard(self, who: bytes) -> None:
        seen = Synchronisation(who.decode(), "".join(traceback.format_stack()[:-1]))
        for found in self._open:
            found.append(seen)
