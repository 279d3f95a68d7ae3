"""`AbsentChains`: chains of blocks that one rank leaves out of a call, and others run."""

from collections.abc import Callable, Iterator, Sequence

from tapestream.errors import InputError
from tapestream.executor.interpreter import Interpreter

Interpreters = Sequence[Interpreter | None]


class AbsentChains:
    """Of one call, where blocks are divided among ranks: the others gather the blocks of such a chain and sum their
    gradients, and so does this rank, when the chain's turn comes. ``order``: (chain, stage) of every block in the order
    of their calls."""

    def __init__(self, order: Sequence[tuple[int, int]], *, divided: bool) -> None:
        self._order = order if divided else ()
        self._turns = list(dict.fromkeys(segment for segment, _ in self._order))
        self._left: list[int] = []  # passed by, whose backward is to come

    def pass_by(self, segment: int | None, begun: Interpreters, begin: Callable[[int], Interpreter]) -> None:
        """``segment`` begins (None: backward does): those before it that have not begun are left out. Raises
        InputError where blocks of such a chain and of this one would take turns."""
        for one in self._turns:
            if one == segment:
                return
            if begun[one] is not None:
                continue
            if segment is not None and self._places(one)[-1] > self._places(segment)[0]:
                raise InputError(
                    "this rank leaves out a chain of blocks that takes turns with another one, and blocks are divided "
                    "among ranks: run the chain on every rank (multiply what it makes by zero), or use ts.Peers()"
                )
            begin(one).pass_forward()
            self._left.append(one)

    def back_to(self, segment: int | None, begun: Interpreters) -> None:
        """Backward has come to ``segment`` (None: to its end), and passed by those that were left out after it."""
        until = -1 if segment is None or segment not in self._turns else self._turns.index(segment)
        while self._left and self._turns.index(self._left[-1]) > until:
            interpreter = begun[self._left.pop()]
            if interpreter is not None:
                interpreter.finish_backward()

    def in_the_end(self, begun: Interpreters) -> Iterator[Interpreter]:
        """What is to be finished when backward has ended, those that were left out first."""
        self.back_to(None, begun)
        yield from (interpreter for interpreter in begun if interpreter is not None)

    def _places(self, segment: int) -> list[int]:
        return [number for number, (one, _) in enumerate(self._order) if one == segment]
