"""Updates on the host, as a schedule is issued: begun when the gradient is there, ended when somebody needs the
weights, or has to wait for nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from tapestream.costs import Profile
from tapestream.ir import Action, Free, Kind, Tier, Update, Value, Wait
from tapestream.simulate.clock import Clock, Job


@dataclass(frozen=True, slots=True)
class Hosted:
    """``blocks``: updated in HOST; ``late``: those of them whose updates go on under the next step's forward."""

    blocks: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()

    def standing_for(self, runs: Sequence[Sequence[int]]) -> "Hosted":
        """The same of blocks that each stand for several."""
        blocks, late = (
            frozenset(n for n, run in enumerate(runs) if not some.isdisjoint(run)) for some in (self.blocks, self.late)
        )
        return Hosted(blocks, late)


NONE_HOSTED = Hosted()


class HostUpdates:
    """``actions``: where they are put. A gradient is freed when it was used, and backward makes the next one anew."""

    def __init__(self, profile: Profile, clock: Clock, actions: list[Action]) -> None:
        self._profile, self._clock, self._actions = profile, clock, actions
        self._asked: dict[int, list[Update]] = {}  # by block: their gradient is on its way
        self.under_way: dict[int, Job] = {}  # by block, in order

    def ask(self, action: Update, landed: bool) -> None:
        """An update is due; ``landed``: its gradient is there."""
        if landed:
            self._begin(action)
        else:
            self._asked.setdefault(action.block, []).append(action)

    def arrived(self, value: Value) -> None:
        """A value has come home: perhaps a gradient that updates wait for."""
        for action in self._asked.pop(value.index, ()) if value.kind is Kind.GRADIENT else ():
            self._begin(action)

    def uses(self, value: Value) -> bool:
        """Whether an update under way writes it."""
        return value.index in self.under_way and value.kind is Kind.PARAMETERS

    def make_way(self, value: Value) -> None:
        """A value is about to go up: wait for an update that writes it."""
        if self.uses(value):
            self._end(value.index)

    def _end(self, block: int) -> None:
        self._clock.wait("", Tier.HOST, Tier.HOST, self.under_way.pop(block))
        self._actions += [Wait(Value(Kind.PARAMETERS, block), Tier.HOST), Free(Value(Kind.GRADIENT, block), Tier.HOST)]

    def end_all(self) -> None:
        """Wait for all of them."""
        for block in tuple(self.under_way):
            self._end(block)

    def retire(self) -> None:
        """Take note of those that have ended."""
        for block, job in tuple(self.under_way.items()):
            if job.end > self._clock.now:
                return
            self._end(block)

    def _begin(self, action: Update) -> None:
        self._actions.append(action)
        seconds = self._profile.blocks[action.block].part_seconds(action.part, Tier.HOST)
        self.under_way[action.block] = self._clock.update_on_host("", seconds)


def is_on_host(action: Action) -> TypeGuard[Update]:
    """Whether it is an update there."""
    return isinstance(action, Update) and action.tier is Tier.HOST
