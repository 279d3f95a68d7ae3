"""The judge: walks a schedule action by action, checks every rule of docs/ir.md and adds up bytes and seconds."""

from collections.abc import Callable
from typing import Any

import numpy
from numpy.typing import NDArray

from tapestream.costs import Machine, Profile, UniformStages
from tapestream.ir import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    KeepInside,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Schedule,
    Tier,
    Update,
    Value,
    Wait,
)
from tapestream.simulate.blocks import Blocks
from tapestream.simulate.clock import Clock
from tapestream.simulate.ending import check_end, check_start
from tapestream.simulate.explain import RuleBroken, broken, explained
from tapestream.simulate.memory import Memory, States
from tapestream.simulate.places import DEVICE, Places


class Judge:
    """The state of one step: values are in `places`, states in `states`, bytes in `memory`, time in `clock`."""

    def __init__(self, schedule: Schedule, profile: Profile, machine: Machine | None, tracing: bool = False) -> None:
        self.schedule = schedule
        self.profile = profile
        self.stages = profile.stages
        self.n = len(profile)
        self.at_once = not profile.carried and not tracing
        self.uniform = isinstance(profile.stages, UniformStages)
        self.running: NDArray[numpy.int64] | None = None  # of each stage: its input, output and what a forward takes
        self.memory = Memory(profile.outside_nbytes)
        self.clock = Clock(machine, tracing)
        self.states = States(profile, self.memory)
        self.places = Places(profile, self.memory, self.states, self.clock)
        if tracing:
            self.memory.samples = tuple([] for _ in Tier)
            self.memory.now = lambda: self.clock.now
        self.phase: PhaseKind | None = None
        self.phase_seconds: dict[PhaseKind, float] = {}
        self.phase_began = 0.0
        self.forwards = self.recorded = 0
        self.keeping: int | None = None  # the stage whose next run keeps what it makes inside
        self.ends, self.spans = profile.ends, profile.spans
        self.due = {start: stop - 1 for start, stop in self.spans}  # the next backward of each branch, by its input
        self.blocks = Blocks(profile, self.places, self.clock)

    @property
    def next_backward(self) -> int:
        """The last of the stages whose backward is still to come, -1 for none."""
        return max((k for start, k in self.due.items() if k >= start), default=-1)

    def run(self) -> None:
        """Walk the whole schedule. Raises ScheduleError at the first broken rule."""
        memory, done = self.memory, 0
        try:
            check_start(self)
            for done, action in enumerate(self.schedule, 1):
                memory.position = done - 1
                if self.phase is None and not isinstance(action, Phase):
                    broken("the first action must be Phase(FORWARD)")
                self.obey(action)
                if memory.samples:
                    memory.sample()
            memory.position = done
            check_end(self)
        except RuleBroken as rule:
            raise explained(self.schedule, memory.position, str(rule)) from None
        self._close_phase()

    def obey(self, action: Action) -> None:
        """Check and apply one action."""
        _RULES[type(action)](self, action)

    def offload(self, action: Offload) -> None:
        """Offload: a copy to a slower tier begins."""
        if action.target <= action.source:
            broken("Offload goes to a slower tier; use Prefetch for a faster one")
        self.places.copy(action.value, action.source, action.target)

    def prefetch(self, action: Prefetch) -> None:
        """Prefetch: a copy to a faster tier begins."""
        if action.target >= action.source:
            broken("Prefetch goes to a faster tier; use Offload for a slower one")
        self.places.copy(action.value, action.source, action.target)

    def enter(self, kind: PhaseKind) -> None:
        """Phase: the boundary between two of the user's calls."""
        if kind is not (order := {None: PhaseKind.FORWARD, PhaseKind.FORWARD: PhaseKind.BACKWARD,
                                  PhaseKind.BACKWARD: PhaseKind.STEP}.get(self.phase)):  # fmt: skip
            broken(f"phases come once each, forward, backward, step; {'none' if order is None else order.name} is next")
        self._close_phase()
        self.phase = kind
        states, memory, profile = self.states, self.memory, self.profile
        if kind is PhaseKind.FORWARD:
            states.live = 0
            states.hold(0)
            for end in self.ends:  # the inputs of other branches wait as kept states
                states.kept.add(end + 1)
                states.hold(end + 1)
            memory.touch(DEVICE)
        elif kind is PhaseKind.BACKWARD:
            self._turn()
            self.clock.compute(profile.turn_seconds, "Turn", self.n)
        else:
            if self.next_backward >= 0:
                broken(f"Backward({self.next_backward}) and those below it must come before the step")
            for start in self.due:
                self._need_cotangent(start)
                self.places.drop_all(Kind.COTANGENT, start)

    def _turn(self) -> None:
        """The last state, or those of all branches, one live and the others kept, go to the caller."""
        states, places = self.states, self.places
        lasts = (*self.ends, self.n)
        missing = [k for k in lasts if k != states.live and (k not in states.kept or not self.ends)]
        if missing:
            which = f"be {self.n}, the last" if not self.ends else f"be the last of a branch and {missing[0]} be kept"
            broken(f"the live state must {which}, and is {states.live}; run the chain to its end first")
        for k in lasts:
            places.make(Kind.COTANGENT, k)
        self.memory.touch(DEVICE, self.profile.turn_nbytes, self.n - 1)
        for k in lasts:
            if k != states.live:
                states.kept.remove(k)
            places.release(k)
        states.live = None

    def forward(self, start: int, stop: int) -> None:
        """Forward: stage by stage, each input dropped unless somebody else holds it."""
        states, stages = self.states, self.stages
        if not 0 <= start < stop <= self.n:
            broken(f"0 <= start < stop <= {self.n} must hold, there are {self.n} stages")
        if self.ends and (end := next((end for end in self.ends if start <= end < stop), None)) is not None:
            broken(f"state {end} is the last of its branch; put Restore({end + 1}) before, which starts the next")
        if states.live != start:
            broken(f"the live state must be {start} and is {states.live}; put Restore({start}) before")
        self.forwards += stop - start
        keeping, self.keeping = self._kept_inside(start), None
        if keeping is None and self.at_once and stop - start > 2 and self._forward_at_once(start, stop):
            return
        for k in range(start, stop):
            cost = stages[k]
            if cost.block is not None:
                self.blocks.need(cost.block)
            self._appears(k + 1)
            if k == keeping:
                self.places.make(Kind.INSIDE, k)
            self.memory.touch(DEVICE, cost.forward_extra_nbytes, k)
            states.live = k + 1
            self.places.release(k)
            self.clock.compute(cost.forward_seconds, "Forward", k)

    def _forward_at_once(self, start: int, stop: int) -> bool:
        """The same in one go, if nobody holds a state on the way and every stage needs the same block or none; False:
        nothing was done."""
        states, holds, first, block = self.states, self.states.holds, self.stages[start], self.stages[start].block
        if self.places.flights or (self.profile.blocks and not self.uniform):
            return False
        way = range(start + 1, stop + 1)
        if any(k in way for k in holds) if len(holds) < len(way) else not holds.keys().isdisjoint(way):
            return False
        if block is not None:
            self.blocks.need(block)
        self.memory.touch(DEVICE, states.nbytes_of(start + 1) + first.forward_extra_nbytes, start)
        self.places.release(start)
        self.memory.touch(DEVICE, *self._most_running(start + 1, stop))
        states.live = stop
        states.hold(stop)
        if self.uniform:
            self.clock.compute((stop - start) * first.forward_seconds, "Forward", start)
        else:
            for k in range(start, stop):
                self.clock.compute(self.stages[k].forward_seconds, "Forward", k)
        return True

    def _most_running(self, start: int, stop: int) -> tuple[int, int]:
        """The most bytes that a forward of one of these stages takes, input and output included, and the stage."""
        stages, nbytes_of = self.stages, self.states.nbytes_of
        if self.uniform:
            return 2 * nbytes_of(stop) + stages[start].forward_extra_nbytes, start
        if self.running is None:
            running = [nbytes_of(k) + nbytes_of(k + 1) + cost.forward_extra_nbytes for k, cost in enumerate(stages)]
            self.running = numpy.array(running, numpy.int64)
        stage = start + int(self.running[start:stop].argmax())
        return int(self.running[stage]), stage

    def record(self, k: int) -> None:
        """Record: run one stage, its saved tensors and what its backward reads stay."""
        states, places = self.states, self.places
        if not 0 <= k < self.n:
            broken(f"there is no stage {k}, there are {self.n} numbered from 0")
        if k in self.ends:
            broken(f"there is no stage {k}: state {k} is the last of its branch")
        if states.live != k:
            broken(f"the live state must be {k} and is {states.live}; put Restore({k}) before")
        if k in places.recorded:
            broken(f"stage {k} is recorded already")
        if self.keeping is not None:
            broken(f"KeepInside({self.keeping}) must be followed by a Forward of that stage")
        cost = self.stages[k]
        if cost.block is not None:
            self.blocks.need(cost.block)
        self._appears(k + 1)
        inside = bool(places.current[Kind.INSIDE].get(k, 0))
        places.drop_all(Kind.INSIDE, k)  # it is among what is saved from here on
        places.make(Kind.SAVED, k)
        if cost.reads_input:
            states.hold(k)
        if cost.reads_output:
            states.hold(k + 1)
        self.memory.touch(DEVICE, cost.recorded_extra_nbytes, k)
        states.live = k + 1
        places.release(k)
        self.forwards += 1
        self.recorded += 1
        self.clock.compute(max(0.0, cost.recorded_seconds - inside * cost.inside_seconds), "Record", k)

    def backward(self, k: int) -> None:
        """Backward: consume the saved tensors and the cotangent of the output."""
        states, places = self.states, self.places
        branch, last = self._branch_of(k)
        if k != self.due[branch]:
            next_one = self.due[branch] if self.due[branch] >= branch else self.next_backward
            broken(f"backwards run {last - 1}, {last - 2}, .., {branch}, each once; Backward({next_one}) is next")
        self._need_cotangent(k + 1)
        if not places.recorded.get(k, 0) & 1:
            broken(f"{places.whereabouts(Kind.SAVED, k)}, it must be current on DEVICE")
        cost = self.stages[k]
        if cost.block is not None and cost.reads_parameters:
            self.blocks.need(cost.block)
        if states.live == k + 1:
            states.live = None
            places.release(k + 1)
        if cost.block is not None:
            self.blocks.add_gradient(cost.block)
        self.memory.nbytes[DEVICE] += cost.gradient_nbytes
        places.make(Kind.COTANGENT, k)
        self.memory.touch(DEVICE, cost.backward_extra_nbytes, k)
        places.drop_all(Kind.SAVED, k)
        places.drop_all(Kind.COTANGENT, k + 1)
        places.forget(k)
        self.due[branch] = k - 1
        self.clock.compute(cost.backward_seconds, "Backward", k)

    def _branch_of(self, k: int) -> tuple[int, int]:
        """The first and last state of the branch of stage ``k``."""
        if len(self.spans) == 1:
            return self.spans[0]
        return next((span for span in reversed(self.spans) if span[0] <= k), self.spans[0])

    def keep(self, k: int) -> None:
        """Keep: one more holder of the live state."""
        states = self.states
        if states.live != k:
            broken(f"the live state must be {k} and is {states.live}")
        if k in states.kept:
            broken(f"state {k} is kept already")
        states.kept.add(k)
        states.hold(k)

    def keep_inside(self, k: int) -> None:
        """KeepInside: the next run is that of stage ``k``, a Forward."""
        if self.states.live != k:
            broken(f"the live state must be {k} and is {self.states.live}")
        if k in self.places.recorded or k in self.places.current[Kind.INSIDE]:
            broken(f"stage {k} is recorded, or its inside kept, already")
        self.keeping = k

    def _kept_inside(self, start: int) -> int | None:
        """What the Forward from ``start`` on is to keep."""
        if self.keeping not in (None, start):
            broken(f"KeepInside({self.keeping}) must be followed by a Forward of that stage")
        return self.keeping

    def restore(self, k: int) -> None:
        """Restore: the live state changes, at no cost."""
        states = self.states
        if k not in states.kept:
            broken(f"state {k} is not kept on DEVICE; put Keep({k}) where it is live, or Prefetch it")
        if self.places.flights and not self.places.is_current(Value(Kind.STATE, k), DEVICE):
            broken(f"{self.places.whereabouts(Kind.STATE, k)}; put Wait before Restore")
        former, states.live = states.live, k
        states.hold(k)
        if former is not None:
            self.places.release(former)

    def _appears(self, k: int) -> None:
        """A run makes state ``k``, live from now on."""
        flights = self.places.flights
        if flights and (flight := flights.get(Value(Kind.STATE, k))) and DEVICE in (flight.source, flight.target):
            broken(f"this run makes STATE {k}, which is in flight to {flight.target.name}; put Wait before it")
        self.states.hold(k)

    def _need_cotangent(self, k: int) -> None:
        if not self.places.current[Kind.COTANGENT].get(k, 0) & 1:
            broken(f"{self.places.whereabouts(Kind.COTANGENT, k)}, it must be current on DEVICE")

    def _close_phase(self) -> None:
        if self.phase is not None:
            self.phase_seconds[self.phase] = self.clock.now - self.phase_began
            self.phase_began = self.clock.now


_RULES: dict[type[Action], Callable[[Judge, Any], None]] = {  # schedules are long: a `match` asks class after class
    Forward: lambda judge, action: judge.forward(action.start, action.stop),
    Record: lambda judge, action: judge.record(action.stage),
    Backward: lambda judge, action: judge.backward(action.stage),
    Keep: lambda judge, action: judge.keep(action.stage),
    KeepInside: lambda judge, action: judge.keep_inside(action.stage),
    Restore: lambda judge, action: judge.restore(action.stage),
    Offload: Judge.offload,
    Prefetch: Judge.prefetch,
    Wait: lambda judge, action: judge.places.wait(action.value, action.tier),
    Free: lambda judge, action: judge.places.free(action.value, action.tier),
    Update: lambda judge, action: judge.blocks.update(action, judge.next_backward),
    Phase: lambda judge, action: judge.enter(action.kind),
}
