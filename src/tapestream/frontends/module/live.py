"""Calls of a streamed model that are under way, and the store as one of their chains sees it."""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tapestream.errors import GradientError
from tapestream.executor.blocks import BlockStore
from tapestream.executor.gradients import Sums
from tapestream.frontends.module.prepare import Prepared

if TYPE_CHECKING:
    from tapestream.frontends.module.call import StreamCall


@dataclass(slots=True, eq=False)
class Live:
    """Calls of one model that still await their backward, and the one whose backward is under way."""

    calls: "weakref.WeakSet[StreamCall]" = field(default_factory=weakref.WeakSet)
    differentiated: "StreamCall | None" = None
    busy: bool = False

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Inside, calls that end do not disturb the store. What a backward that ended in somebody else's exception
        has left ends first."""
        if self.differentiated is not None and not self.busy:
            self.differentiated.abort()
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def check_none(self, what: str, prepared: Prepared | None) -> None:
        """Raise GradientError where another forward would see weights that an awaited backward changes."""
        if prepared is not None and prepared.update == "backward" and self.calls:
            raise GradientError(
                f"{what} before the backward of the first: with update='backward' the first backward changes the "
                f"weights that the "
                "second forward has used; call backward() first, or use update='step'"
            )


class SegmentView:
    """The store as one segment's interpreter sees it: stages numbered within the segment."""

    def __init__(self, store: BlockStore, uses: list[int | None]) -> None:
        self._store, self._uses = store, uses
        self.wanted = True  # whether the backward at hand asks for gradients of parameters
        self._last_use = {b: k for k, b in reversed(list(enumerate(uses))) if b is not None}
        self.start, self.wait, self.free = store.start, store.wait, store.free
        self.update, self.has_gradient = store.update, store.has_gradient

    def compute_begins(self, stage: int) -> None:
        self._store.compute_begins(self._uses[stage])

    def compute_ended(self, stage: int) -> None:
        self._store.compute_ended(self._uses[stage])

    def backward_ended(self, stage: int, sums: Sums) -> None:
        block = self._uses[stage]
        if not self.wanted:
            sums.clear()
        elif block is not None and self._last_use[block] == stage:
            self._store.take_gradients(block, sums)
