"""`Longest`: the longest call that will come, as the user announces it. It is planned before any shorter one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapestream.errors import InputError
from tapestream.frontends.given import arguments_of
from tapestream.frontends.module.calls.gathering import gathering
from tapestream.frontends.module.calls.refused import or_split
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.runner.private import tensors_in

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed


class Longest:
    """Plans for the longest call. Its ``arguments`` are kept (None: not announced): the optimizer, or what is
    trainable, may change.

    ``prepared``: its plans, None before they are made, and where no longest call was announced.
    """

    def __init__(self, batch: Any = None) -> None:
        """``batch``: its arguments, as `plan` takes them (None: not announced). Raises InputError where they hold no
        tensor."""
        self.arguments = None if batch is None else arguments_of(batch)
        if self.arguments is not None and not tensors_in([self.arguments]):
            raise InputError(
                f"longest={batch!r} holds no tensor; give the arguments of the longest call, as ts.plan takes them"
            )
        self._planning = False
        self.prepared: Prepared | None = None

    def plan(self, handle: "Streamed") -> None:
        """Plan for it, as it is the first time that a call of its kind is planned. Nothing is run that leaves a trace.

        Raises BudgetError, which names the least for the longest call.
        """
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
        return or_split(handle, handle.prepare_for, *self.arguments, plan, which="the longest call (longest=): ")
