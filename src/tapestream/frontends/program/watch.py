"""Which restart checkpoints the first sweep keeps: those of a plan, or, while none applies, chosen as it goes on."""

from collections.abc import Collection
from typing import Protocol

from tapestream.executor.program.keeper import Keeper
from tapestream.executor.program.record import Record
from tapestream.executor.program.recorder import Recorder


class Watch(Protocol):
    """Hears of every operation before it runs."""

    def __call__(self, k: int, saved_nbytes: int) -> None: ...


class Online:
    """A restart checkpoint every ``stride`` ticks; where they take more than half the budget, every second one goes and
    the stride doubles. A tick has passed when backward would have kept another sixteenth of the budget."""

    def __init__(self, record: Record, keeper: Keeper, budget: int) -> None:
        self.record, self.keeper = record, keeper
        self.recorder: Recorder | None = None
        self._tick, self._room = max(1, budget // 16), budget // 2
        self._stride, self._next, self._ticks = 1, self._tick, 0
        self._at: dict[int, int] = {}  # by operation, its tick

    def __call__(self, k: int, saved_nbytes: int) -> None:
        """Keep, or not."""
        if saved_nbytes < self._next:
            return
        self._next = saved_nbytes + self._tick
        self._ticks += 1
        if self._ticks % self._stride:
            return
        assert self.recorder is not None
        self.keeper.keep(k, self.recorder.alive())
        self._at[k] = self._ticks
        while len(self._at) and self.keeper.nbytes(self.record) > self._room:
            self._stride *= 2
            for operation in [o for o, tick in self._at.items() if tick % self._stride]:
                del self._at[operation]
                if operation in self.keeper.kept:
                    self.keeper.drop(operation)
            if self._stride > self._ticks:
                break


class Planned:
    """Keeps before the operations ``where``; goes on by ``otherwise`` once the program differs from the one planned for
    (``saved``: bytes saved before each of ``where``)."""

    def __init__(self, where: Collection[int], saved: dict[int, int], operations: int, otherwise: Online) -> None:
        self._where, self._saved, self._operations, self.otherwise = where, saved, operations, otherwise
        self._off = False

    def __call__(self, k: int, saved_nbytes: int) -> None:
        """Keep, or not."""
        if self._off or k >= self._operations:
            self.otherwise(k, saved_nbytes)
        elif k in self._where:
            if self._saved[k] != saved_nbytes:
                self._off = True
            assert self.otherwise.recorder is not None
            self.otherwise.keeper.keep(k, self.otherwise.recorder.alive())
