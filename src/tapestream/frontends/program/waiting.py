"""`Waiting`: what a call that waits for its backward takes of the budget."""

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tapestream.executor.program.noting.along import Mark
from tapestream.executor.program.record.tape import Tape
from tapestream.executor.program.replay.moves import Moves
from tapestream.frontends.giving_way import Reason
from tapestream.ir import Tier

if TYPE_CHECKING:
    from tapestream.frontends.program.live import Live


class Waiting:
    """Counted in ``live`` as long as ``holder`` lives, which autograd holds.

    A result that backward did not reach (an auxiliary one, held until the next call) keeps the holder: what counts from
    then on is what is there. One whose tape is the graph's own cannot give way. ``moves``: what has left the device.
    """

    def __init__(
        self,
        live: "Live",
        nbytes: Mapping[Tier, int],
        holder: Tape | Mark,
        moves: Moves | None = None,
    ) -> None:
        self._live, self._nbytes, self._full = live.nbytes, dict(nbytes), nbytes[Tier.DEVICE]
        self._awaiting, self._moves = live.awaiting, moves
        self._tape = weakref.ref(holder) if isinstance(holder, Tape) else None
        for tier, n in nbytes.items():
            live.nbytes[tier] += n
        weakref.finalize(holder, self._end).atexit = False
        self._waits()

    @property
    def nbytes(self) -> int:
        """Of the device, now."""
        return self._nbytes.get(Tier.DEVICE, 0)

    def begins(self) -> None:
        """A backward begins: it may take all that was planned."""
        self._awaiting.ends(self)
        self._holds(self._full)

    def ended(self, nbytes: int) -> None:
        """It has ended, and so many bytes of the device are there still."""
        self._holds(nbytes)
        self._waits()

    def give_way(self, reason: Reason) -> None:
        """See `giving_way.GivesWay`."""
        self._awaiting.ends(self)
        if self._tape is not None and (tape := self._tape()) is not None:
            tape.give_way(reason)
        if self._moves is not None:
            self._moves.abandon()
        self._end()

    def _waits(self) -> None:
        if self._tape is not None and self._nbytes:
            self._awaiting.begins(self)

    def _holds(self, nbytes: int) -> None:
        if self._nbytes:
            self._live[Tier.DEVICE] += nbytes - self._nbytes[Tier.DEVICE]
            self._nbytes[Tier.DEVICE] = nbytes

    def _end(self) -> None:
        for tier, n in self._nbytes.items():
            self._live[tier] -= n
        self._nbytes = {}
