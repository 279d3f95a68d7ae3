"""`Live`: what calls of a program that wait for their backward leave of its budget for others."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tapestream.costs import Budget
from tapestream.frontends.giving_way import Awaiting, Reason
from tapestream.frontends.others import beside_others, room_for_call
from tapestream.frontends.program.given import remember
from tapestream.frontends.program.plans import Prepared
from tapestream.frontends.program.waiting import Waiting
from tapestream.ir import Tier
from tapestream.runner.graph import let_go_of_failed_backward

T = TypeVar("T")


class Live:
    """Calls of one program that wait, and the bytes that they hold in each tier, of its ``budget``."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.nbytes, self.awaiting = budget, dict.fromkeys(Tier, 0), Awaiting()
        self._alone: dict[Any, Reason] = {}  # kinds of calls that did not fit beside others

    def whole(self, device: torch.device, host_nbytes: int | None) -> Budget:
        """What a call may take as if none waited."""
        return room_for_call("Program", self.budget, dict.fromkeys(Tier, 0), host_nbytes, device)

    def room(self, device: torch.device, host_nbytes: int | None) -> Budget:
        """What they leave. Raises BudgetError where that is nothing."""
        if any(self.nbytes.values()):
            let_go_of_failed_backward()
        return room_for_call("Program", self.budget, self.nbytes, host_nbytes, device)

    def room_for(self, key: Any, prepared: Prepared | None, device: torch.device, host_nbytes: int | None) -> Budget:
        """What they leave for a call of this kind, and its plan. They give way to it if they leave nothing, and at once
        if one did not fit beside others before, and does alone by its plan."""
        room = self.awaiting.planned(lambda: self.room(device, host_nbytes), lambda: self.whole(device, host_nbytes))
        reason = self._alone.get(key)
        if reason is None or prepared is None or not prepared.fits(self.whole(device, host_nbytes)):
            return room
        for call in self.awaiting.all():
            if prepared.fits(room):
                break
            call.give_way(reason)
            room = self.room(device, host_nbytes)
        return room

    def planned(self, key: Any, within: Callable[[int], T]) -> T:
        """The plan for a call of this kind that has run: what ``within`` finds with so many bytes more than there were,
        since others have given way. Raises BudgetError."""
        held = self.nbytes[Tier.DEVICE]

        def freed(nbytes: int) -> T:
            with beside_others("Program", held - nbytes, self.budget):
                return within(nbytes)

        return self.awaiting.planned(
            lambda: freed(held - self.nbytes[Tier.DEVICE]),
            lambda: freed(sum(one.nbytes for one in self.awaiting.all() if isinstance(one, Waiting))),
            lambda reason: remember(self._alone, key, reason),
        )
