"""`Longest`: the longest call that will come, as the user announces it. It is planned before any shorter one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapestream.frontends.given import Arguments
from tapestream.frontends.module.calls.gathering import gathering
from tapestream.frontends.module.calls.refused import or_split
from tapestream.frontends.module.calls.sizes import longest_of, shape_in
from tapestream.frontends.module.plans.prepare import Prepared

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

LONGEST_CALL = "the longest call (longest=): "


class Longest:
    """Plans for the longest call. Its ``arguments`` are kept (None: not announced, or by a shape alone before the first
    call): the optimizer, or what is trainable, may change.

    ``prepared``: its plans, None before they are made, and where no longest call was announced.
    """

    def __init__(self, batch: Any = None) -> None:
        """``batch``: its arguments, as `plan` takes them, or the shape of the first tensor (None: not announced).
        Raises InputError where they hold no tensor."""
        self.arguments: Arguments | None = None
        self._shape = None if batch is None else shape_in(batch)
        if batch is not None and self._shape is None:
            self.arguments = longest_of(batch, (), {})
        self._planning = False
        self.prepared: Prepared | None = None

    def plan(self, handle: "Streamed", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan for it, as it is the first time that a call of its kind is planned. Nothing is run that leaves a trace.
        Where a shape was announced, it is a call like the one that is given.

        Raises BudgetError, which names the least for the longest call, and InputError for a shape that such calls
        cannot have.
        """
        if self.arguments is None and self._shape is not None:
            self.arguments = longest_of(self._shape, args, kwargs)
        if self.arguments is None or self._planning:
            return
        args, kwargs = self.arguments
        self._planning = True
        try:
            self.prepared = self._or_split(handle, lambda: handle.prepare_for(args, kwargs))
        finally:
            self._planning = False

    def gather(self, handle: "Streamed") -> None:
        """Earlier backwards may have left gradients, as they may for the longest call. Raises as `plan`."""
        if (prepared := self.prepared) is not None:
            self._or_split(handle, lambda: gathering(handle, prepared, handle._beside))

    def _or_split(self, handle: "Streamed", plan: Callable[[], Prepared]) -> Prepared:
        assert self.arguments is not None
        return or_split(handle, handle.prepare_for, *self.arguments, plan, which=LONGEST_CALL)
