"""Updates on the host, as a schedule is issued: begun when all that they need is there, ended when somebody needs the
weights, or has to wait for nothing. What lives on the disk comes to the host for its update and goes back after it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard
from weakref import WeakMethod

from tapestream.costs import Profile
from tapestream.ir import Action, Free, Kind, Offload, Phase, PhaseKind, Prefetch, Tier, Update, Value, Wait
from tapestream.passes.host_room import HostRoom
from tapestream.passes.stays import Stay
from tapestream.simulate.clock import Clock, Job

_STEP = Phase(PhaseKind.STEP)


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


@dataclass(slots=True)
class _Window:
    """The update of a block: ``due``: the position of its first part; ``stays``: of what it needs from the disk;
    ``asked``: parts that are due by now; ``landed``: whether its gradient is there; ``started``: whether the rest
    comes; ``coming``: what of it is on its way."""

    block: int
    due: int
    stays: list[Stay]
    asked: list[Update] = field(default_factory=list)
    landed: bool = False
    started: bool = field(init=False)
    coming: dict[Value, Job | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = not self.nbytes

    @property
    def nbytes(self) -> int:
        """What comes takes of the host."""
        return sum(stay.nbytes for stay in self.stays if stay.arrive)


class HostUpdates:
    """``actions``: where they are put. A gradient is freed when it was used, and backward makes the next one anew.

    ``stays``: those in HOST are of what comes from the disk for an update; ``room``: for them. ``land(block,
    position)`` waits until the gradient of a block has come. ``passing``: gradients that have no place there.
    """

    def __init__(
        self, profile: Profile, clock: Clock, actions: list[Action], stays: Sequence[Stay],
        computation: Sequence[Action], room: HostRoom, land: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self._profile, self._clock, self._actions, self._room = profile, clock, actions, room
        self._land = WeakMethod(land)  # else each of many walks would stay, with all it holds, until a collection
        self._asked: dict[int, _Window] = {}  # by block: something that they need is on its way
        self._under_way: dict[int, Job] = {}  # by block, in order
        self._leaving: dict[Value, tuple[Stay, Job | None]] = {}
        own = defaultdict[int, list[Stay]](list)
        for stay in stays:
            if stay.tier is Tier.HOST:
                own[stay.value.index].append(stay)
        self.passing = frozenset(stay.value for found in own.values() for stay in found if not stay.arrive)
        due = {a.block: at for at, a in reversed([*enumerate(computation)]) if is_on_host(a)}
        self._windows = {block: _Window(block, due[block], own[block]) for block in sorted(due, key=due.__getitem__)}
        self._ahead = [window for window in self._windows.values() if window.nbytes]  # not started
        self._step = next((at for at, a in enumerate(computation) if a == _STEP), -1) if self._ahead else -1
        in_flight = (stay.nbytes_in(Tier.HOST) for stay in stays if Tier.HOST in stay.arrive[1:-1])
        self._reserve = max((*in_flight, *(s.nbytes for f in own.values() for s in f if not s.arrive)), default=0)

    def fetch_ahead(self, position: int) -> None:
        """Let what the next update of this phase needs come, if nothing else comes from the disk: computation waits for
        weights, and nobody for updates. Those that are due later leave room for others on their way."""
        while self._ahead and self._clock.is_idle(Tier.DISK, Tier.HOST):
            window = self._ahead[0]
            if position < self._step < window.due:
                return
            if window.asked:
                full = self._room.lacks(window.nbytes, position)
            else:
                full = not self._room.allows(window.nbytes, position, window.due, self._reserve)
            if full:
                return
            self._start(window, position)

    def ask(self, action: Update, position: int, landed: bool) -> None:
        """An update is due; ``landed``: its gradient is there."""
        window = self._windows[action.block]
        window.asked.append(action)
        window.landed = window.landed or landed
        self._asked[action.block] = window
        if action.part == 0 and window.started:
            self._fetch(window, state=False)
        self.fetch_ahead(position)
        self._begin_where_ready(window)

    def arrived(self, value: Value) -> None:
        """A value has come home: perhaps a gradient that updates wait for."""
        if value.kind is Kind.GRADIENT and value.index in self._windows:
            self._windows[value.index].landed = True
            self._begin_where_ready(self._windows[value.index])

    def uses(self, value: Value) -> bool:
        """Whether an update under way writes it."""
        return value.index in self._under_way and value.kind is Kind.PARAMETERS

    def make_way(self, value: Value) -> None:
        """A value is about to go up: wait for an update that writes it."""
        if self.uses(value):
            self._end(value.index)

    def end_all(self, position: int) -> None:
        """Wait for all of them, until what they have written has left."""
        while self.make_progress(position):
            pass

    def retire(self) -> None:
        """Take note of what has ended."""
        now = self._clock.now
        for window in tuple(self._asked.values()) if self._asked else ():
            for value in [value for value, job in window.coming.items() if job is None or job.end <= now]:
                self._has_come(window, value)
            self._begin_where_ready(window)
        for block, update in tuple(self._under_way.items()):
            if update.end > now:
                break
            self._end(block)
        for value, (_, job) in tuple(self._leaving.items()):
            if job is not None and not job.end <= now:
                break
            self._has_left(value)

    def make_progress(self, position: int) -> bool:
        """Wait for the next thing that an update which is due needs or does; False where there is none."""
        for pair in self._clock.pairs.values():
            pair.advance(self._clock.now)
        self.retire()
        if self._asked:
            self.fetch_ahead(position)
        coming = next((window for window in self._asked.values() if window.coming), None)
        needy = next((window for window in self._asked.values() if not window.landed or not window.started), None)
        if needy is not None and not needy.landed:
            land = self._land()
            assert land is not None
            land(needy.block, position)
        elif coming is not None:
            self._has_come(coming, next(iter(coming.coming)))
            self._begin_where_ready(coming)
        elif self._under_way:
            self._end(next(iter(self._under_way)))
        elif self._leaving:
            self._has_left(next(iter(self._leaving)))
        elif needy is not None:  # nothing would make room
            self._start(needy, position)
        else:
            return False
        return True

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self, window: _Window, position: int) -> None:
        """Let it come. Parameters and gradients may be in use until the update is due."""
        self._ahead.remove(window)
        window.started = True
        self._room.take(window.nbytes, position)
        self._fetch(window, state=True)
        if window.asked:
            self._fetch(window, state=False)

    def _fetch(self, window: _Window, *, state: bool) -> None:
        for stay in window.stays:
            if stay.arrive and state is (stay.value.kind is Kind.OPTIMIZER_STATE):
                self._actions.append(Prefetch(stay.value, Tier.DISK, Tier.HOST))
                window.coming[stay.value] = self._clock.issue("", Tier.DISK, Tier.HOST, stay.nbytes)

    def _has_come(self, window: _Window, value: Value) -> None:
        self._clock.wait("", Tier.DISK, Tier.HOST, window.coming.pop(value))
        self._actions.append(Wait(value, Tier.HOST))

    def _begin_where_ready(self, window: _Window) -> None:
        cost = self._profile.blocks[window.block]
        there = window.landed and window.started and not window.coming
        if not there or len(window.asked) < len(cost.parts):
            return
        for action in window.asked:
            self._actions.append(action)
            seconds = cost.part_seconds(action.part, Tier.HOST)
            self._under_way[window.block] = self._clock.update_on_host("", seconds)
        window.asked.clear()
        self._asked.pop(window.block, None)

    def _end(self, block: int) -> None:
        gradient, window = Value(Kind.GRADIENT, block), self._windows[block]
        self._clock.wait("", Tier.HOST, Tier.HOST, self._under_way.pop(block))
        self._actions += [Wait(Value(Kind.PARAMETERS, block), Tier.HOST), Free(gradient, Tier.HOST)]
        for stay in window.stays:
            if stay.leave:
                self._actions.append(Offload(stay.value, Tier.HOST, Tier.DISK))
                self._leaving[stay.value] = stay, self._clock.issue("", Tier.HOST, Tier.DISK, stay.nbytes)
            else:
                self._actions += [Free(gradient, Tier.DISK)] if stay.arrive else []
                self._room.give(stay.nbytes)

    def _has_left(self, value: Value) -> None:
        stay, job = self._leaving.pop(value)
        self._clock.wait("", Tier.HOST, Tier.DISK, job)
        self._actions += [Wait(value, Tier.DISK), Free(value, Tier.HOST)]
        self._room.give(stay.nbytes)


def is_on_host(action: Action) -> TypeGuard[Update]:
    """Whether it is an update there."""
    return isinstance(action, Update) and action.tier is Tier.HOST
