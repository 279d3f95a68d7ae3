"""From computation and stays to a schedule: when each copy of a parameter block starts and is waited for.

A list-scheduling walk over the computation with the judge's clock. With a budget, copies in start as early as memory
permits, in order of need, and copies out are waited for when they have ended or their bytes are needed; without one,
every copy is made just in time and waited for at once.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from tapestream.costs import Budget, Machine, Profile
from tapestream.ir import Action, Free, Kind, Offload, Phase, PhaseKind, Prefetch, Tier, Value, Wait
from tapestream.passes.host_room import HostRoom
from tapestream.passes.host_updates import HostUpdates, is_on_host
from tapestream.passes.memory import Footprint, compute_seconds, stage_moves
from tapestream.passes.stays import Occupancy, Stay, successors
from tapestream.passes.transit import Gathers, Lanes, Transit
from tapestream.simulate.clock import Clock, Job

BARRIERS = (Phase(PhaseKind.FORWARD), Phase(PhaseKind.STEP))
"""Where no copy of a parameter block may be under way."""


class Issued(NamedTuple):
    """Actions, and the seconds that the judge will say they take: both go by the same clock."""

    actions: list[Action]
    seconds: float


def issue(
    computation: Sequence[Action],
    stays: Sequence[Stay],
    profile: Profile,
    base: Footprint,
    machine: Machine | None,
    *,
    budget: Budget | None,
    across: bool = False,
    living_nbytes: int = 0,
    host_nbytes: int | None = None,
) -> Issued:
    """The computation with the copies that ``stays`` ask for.

    ``base``: bytes beside blocks (`footprint`). ``budget`` None: no overlap, least memory. ``across``: parameters may
    arrive for the step phase before it begins; users see them. (Gradients and optimizer state may not: users may
    change what they see of them at home.) ``living_nbytes``: of the host, for values that have a place there, which
    gradients keep until users drop them. Device memory stays within the budget wherever it would with no overlap.
    Linear in actions times the look-ahead that memory allows. Raises BudgetError where the values that live on the host
    and those that pass it take more than ``host_nbytes``.
    """
    walk = _Walk(computation, stays, profile, base, machine, budget, across, living_nbytes)
    for position, action in enumerate(computation):
        if action in BARRIERS:
            walk.settle(position)
        elif not is_on_host(action):
            walk.bring(position)
        walk.run(action, position, profile)
        walk.send(position)
    walk.settle(len(computation) - 1)
    walk.room.check(host_nbytes)
    return Issued(walk.actions, walk.clock.now)


class _Walk:
    """What is where while the schedule is being made."""

    def __init__(
        self,
        computation: Sequence[Action],
        stays: Sequence[Stay],
        profile: Profile,
        base: Footprint,
        machine: Machine | None,
        budget: Budget | None,
        across: bool,
        living_nbytes: int,
    ) -> None:
        every, stays = stays, [stay for stay in stays if stay.tier is not Tier.HOST]
        self.stays, self.base, self.eager, self.across = stays, base, budget is not None, across
        self.limit, self.clock = _limit(budget, Tier.DEVICE), Clock(machine, tracing=False)
        self.occupied = Occupancy(base, stays).nbytes
        out = max((stay.nbytes_in(Tier.HOST) for stay in stays if Tier.HOST in stay.leave[:-1]), default=0)
        self.room = HostRoom(living_nbytes, base.host, _limit(budget, Tier.HOST), out)
        self.actions: list[Action] = []
        self.updates = HostUpdates(profile, self.clock, self.actions, every, computation, self.room, self._land)
        self.moving: list[Transit] = []  # those that go on, see there; in order of their first copies
        self.leaving = 0  # device bytes of values on their way out
        self.others: dict[Value, tuple[Tier, Tier, Job | None]] = {}
        self.done = bytearray(len(stays))
        self.transit: dict[int, Transit] = {}
        self.under_way: dict[Value, Transit] = {}  # the latest of each value
        self.gathers = Gathers(stays)
        self.previous = {later: earlier for earlier, later in successors(stays)}
        self.phase = np.cumsum([0] + [action in BARRIERS for action in computation]).tolist()
        self.queue = sorted((i for i, stay in enumerate(stays) if stay.arrive), key=lambda i: stays[i].start)
        self.lanes = Lanes(stays, self.queue)
        self.next = 0
        self.starting: dict[int, list[int]] = {}
        self.ending: dict[int, list[int]] = {}
        for i in self.queue:
            self.starting.setdefault(stays[i].start, []).append(i)
        for i, stay in enumerate(stays):
            if stay.leave or stay.free:
                self.ending.setdefault(stay.stop, []).append(i)
        self.due: dict[int, list[int]] = {}
        for i, stay in enumerate(stays):
            if stay.due is not None:
                self.due.setdefault(stay.due, []).append(i)

    def run(self, action: Action, position: int, profile: Profile) -> None:
        """Let the clock run; copies of states and saved tensors pass through their lanes too."""
        if is_on_host(action):
            gradient = self.under_way.get(Value(Kind.GRADIENT, action.block))
            self.updates.ask(action, position, landed=gradient is None or gradient.ended)
            if not self.eager:
                self.updates.end_all(position)
            return
        self.actions.append(action)
        self.clock.compute(compute_seconds(action, profile), "", 0)
        match action:
            case Offload(value, source, target) | Prefetch(value, source, target):
                job = self.clock.issue("", source, target, *stage_moves(value, profile))
                self.others[value] = (source, target, job)
            case Wait(value):
                self.clock.wait("", *self.others.pop(value))
            case _:
                pass

    def bring(self, position: int) -> None:
        """Everything that the action at ``position`` needs, and what else may start by now."""
        self._make_room(position)
        self._retire(position)
        before = len(self.actions)
        for i in self.due.get(position, ()):
            self._finish(i, position)
        wanted = self.starting.get(position, ())
        for i in wanted:
            if i not in self.transit:
                self._start(i, position)
            if not self.eager:
                self._arrive(i, position)
        if self.eager:
            self._look_ahead(position)
            for i in wanted:
                self._arrive(i, position)
            if len(self.actions) > before:  # else nothing has changed
                self._retire(position)
                self._look_ahead(position)
            self.updates.fetch_ahead(position)

    def send(self, position: int) -> None:
        """Values whose stay ends with the action at ``position`` go home or are dropped."""
        for i in self.ending.get(position, ()):
            stay = self.stays[i]
            if not stay.leave:
                self.actions.extend(Free(stay.value, tier) for tier in stay.free)
                self.done[i] = 1
                continue
            transit = Transit(i, stay, stay.leave)
            self._hop(transit, position)
            while not self.eager and not transit.ended:
                self._advance(transit, position)

    def settle(self, position: int) -> None:
        """Wait for every copy under way."""
        for transit in [*(t for t in self.moving if t.outward), *self.transit.values()]:
            while not transit.ended:
                self._advance(transit, len(self.occupied) - 1)
        self.updates.end_all(position)

    def _land(self, block: int, position: int) -> None:
        """Wait until the gradient of a block is where it is used by an update on the host."""
        gradient = self.under_way[Value(Kind.GRADIENT, block)]
        while not gradient.ended:
            self._advance(gradient, position)

    def _start(self, i: int, position: int) -> None:
        """Start the first copy of a stay; wait first until an older copy of the value has left, and until the shard is
        there that it comes of."""
        stay, shard = self.stays[i], self.gathers.shard_of.get(i)
        if shard is not None:
            if shard not in self.transit:
                self._start(shard, position)
            self._arrive(shard, position)
        before, under_way = self.previous.get(i), self.under_way.get(stay.value)
        if before is not None:
            self._finish(before, position)
        while under_way is not None and not under_way.ended:
            self._advance(under_way, position)
        self.updates.make_way(stay.value)
        self.transit[i] = transit = Transit(i, stay, stay.arrive)
        self._hop(transit, position)
        while self.next < len(self.queue) and self.queue[self.next] in self.transit:
            self.next += 1

    def _finish(self, i: int, position: int) -> None:
        """Wait until the value of a stay has left."""
        while not self.done[i]:
            self._advance(next(t for t in self.moving if t.number == i), position)

    def _arrive(self, i: int, position: int) -> None:
        while not self.transit[i].ended:
            self._advance(self.transit[i], position)

    def _advance(self, transit: Transit, position: int) -> None:
        """Wait for the copy under way, drop the bytes that it came from, and start the next one."""
        source, target = transit.path[transit.hop - 1], transit.path[transit.hop]
        self.clock.wait("", source, target, transit.job)
        value = transit.stay.value
        self.actions.append(Wait(value, target))
        if transit.outward or transit.hop > 1:
            self.actions.append(Free(value, source))
            if source is Tier.HOST:
                self.room.give(transit.staged)
                transit.staged = 0
            elif transit.outward:
                self.leaving, transit.leaving = self.leaving - transit.leaving, 0
            else:  # the shard that the whole came by
                self.occupied[position : transit.stay.start] -= transit.stay.shard
        if not transit.last:
            self._hop(transit, position)
            return
        transit.ended = True
        if transit.outward:
            self.done[transit.number] = 1
            self.updates.arrived(value)
        if self._goes_on(transit):
            self.moving.remove(transit)

    def _goes_on(self, transit: Transit) -> bool:
        """Whether something follows the end of its copy: another, or the room of what has left."""
        return transit.outward or len(transit.path) > 2 or transit.number in self.gathers.shards

    def _hop(self, transit: Transit, position: int) -> None:
        """Start the copy into the next tier of the path."""
        if transit.hop == 0 and self._goes_on(transit):
            self.moving.append(transit)
        transit.hop += 1
        self.under_way[transit.stay.value] = transit
        source, target, stay = transit.path[transit.hop - 1], transit.path[transit.hop], transit.stay
        if transit.outward and source <= Tier.SHARD:
            summed = stay.after_nbytes if target is Tier.SHARD else 0
            transit.leaving = stay.nbytes_in(source) + summed
            self.leaving += transit.leaving
        if target is Tier.HOST and (not transit.last or stay.value in self.updates.passing):
            self._make_host_room(transit, position)
            transit.staged = stay.nbytes_in(target)
            self.room.take(transit.staged, position)
        elif target <= Tier.SHARD and not transit.outward:
            self.occupied[position : stay.start] += stay.nbytes_in(target)
            self.gathers.begins(stay, target)
        copy = Offload if transit.outward else Prefetch
        self.actions.append(copy(stay.value, source, target))
        transit.job = self.clock.issue("", source, target, stay.moved_nbytes(source, target))

    def _retire(self, position: int) -> None:
        """Take note of copies that have ended: values that left, values half-way in that may go on."""
        for pair in self.clock.pairs.values():
            pair.advance(self.clock.now)
        self.updates.retire()
        for transit in tuple(self.moving):  # few of many have: a call for each would take most of the time of planning
            job = transit.job
            if job is None or job.end <= self.clock.now:
                self._go_on(transit, position)

    def _go_on(self, transit: Transit, position: int) -> None:
        """The copy under way has ended, and perhaps later ones too."""
        while not transit.ended and (transit.job is None or transit.job.end <= self.clock.now):
            if not transit.outward and not transit.last and not self._may_go_on(transit, position):
                break
            self._advance(transit, position)

    def _look_ahead(self, position: int) -> None:
        """Start copies of later stays as far as memory goes: in order of need on each lane, as one that waits for room
        on the device holds up no disk."""
        places, lanes = self.lanes.waiting(self.transit), self.lanes.of
        while places:
            lane, place = min(places.items(), key=lambda item: lanes[item[0]][item[1]])
            i = self.queue[lanes[lane][place]]
            stay = self.stays[i]
            crosses = self.phase[stay.start] != self.phase[position]
            if crosses and not self.across:
                return
            if i not in self.transit and not (crosses and stay.value.kind is not Kind.PARAMETERS):
                if (crosses and len(stay.arrive) > 2) or not self._may_start(i, position):
                    del places[lane]
                    continue
                self._start(i, position)
            places[lane] += 1
            if places[lane] == len(lanes[lane]):
                del places[lane]

    def _may_start(self, i: int, position: int) -> bool:
        """Whether an older copy of the value has left, its shard is there, and there is room."""
        before, stay, shard = self.previous.get(i), self.stays[i], self.gathers.shard_of.get(i)
        if (before is not None and not self.done[before]) or self.updates.uses(stay.value):
            return False
        under_way = self.under_way.get(stay.value)
        if (under_way is not None and not under_way.ended) or (
            shard is not None and (shard not in self.transit or not self.transit[shard].ended)
        ):
            return False
        if stay.arrive[1] is Tier.HOST:  # with a value on its way out beside it
            return self.room.allows(stay.nbytes_in(Tier.HOST), position, stay.start)
        return self._fits(stay, 1, position)

    def _may_go_on(self, transit: Transit, position: int) -> bool:
        """Whether a stay half-way in may: the device has room, and nothing that is needed earlier waits for it."""
        waiting = self.next < len(self.queue) and self.stays[self.queue[self.next]].start < transit.stay.start
        return not waiting and self._fits(transit.stay, transit.hop + 1, position)

    def _fits(self, stay: Stay, hop: int, position: int) -> bool:
        """Whether the device has room from now on until a stay's start for what comes with so many hops."""
        if stay.start <= position:
            return True
        room = self.limit - stay.nbytes_in(stay.arrive[hop])
        room -= self.gathers.before_nbytes(stay)
        if int(self.occupied[position]) + self.leaving > room or int(self.occupied[stay.start - 1]) > room:
            return False
        return int(np.maximum.reduce(self.occupied[position : stay.start])) <= room

    def _make_room(self, position: int) -> None:
        """Wait for copies out until what is left fits beside the action at ``position``."""
        while self.leaving and self.occupied[position] + self.leaving > self.limit:
            self._advance(next(t for t in self.moving if t.leaving), position)

    def _make_host_room(self, newcomer: Transit, position: int) -> None:
        while self.room.lacks(newcomer.stay.nbytes_in(Tier.HOST), position):
            movable = next(self._movable(newcomer, position), None)
            if movable is not None:
                self._advance(movable, position)
            elif not self.updates.make_progress(position):
                return

    def _movable(self, newcomer: Transit, position: int) -> Iterator[Transit]:
        """Values passing through the host that can leave it now."""
        for transit in self.moving:
            if not transit.staged or transit is newcomer:
                continue
            if transit.outward or transit.last or self._fits(transit.stay, transit.hop + 1, position):
                yield transit


def _limit(budget: Budget | None, tier: Tier) -> float:
    nbytes = None if budget is None else budget.nbytes(tier)
    return inf if nbytes is None else nbytes
