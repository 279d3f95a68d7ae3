"""`Waiting`: what a call that waits for its backward takes of the budget."""

import weakref
from collections.abc import Mapping
from typing import Any

from tapestream.ir import Tier


class Waiting:
    """Counted in ``live`` as long as ``holder`` lives, which autograd holds.

    A result that backward did not reach (an auxiliary one, held until the next call) keeps the holder: what counts from
    then on is what is there.
    """

    def __init__(self, live: dict[Tier, int], nbytes: Mapping[Tier, int], holder: Any) -> None:
        self._live, self._nbytes, self._full = live, dict(nbytes), nbytes[Tier.DEVICE]
        for tier, n in nbytes.items():
            live[tier] += n
        weakref.finalize(holder, self._end).atexit = False

    def begins(self) -> None:
        """A backward begins: it may take all that was planned."""
        self.holds(self._full)

    def holds(self, nbytes: int) -> None:
        """So many bytes of the device are there."""
        if self._nbytes:
            self._live[Tier.DEVICE] += nbytes - self._nbytes[Tier.DEVICE]
            self._nbytes[Tier.DEVICE] = nbytes

    def _end(self) -> None:
        for tier, n in self._nbytes.items():
            self._live[tier] -= n
        self._nbytes = {}
