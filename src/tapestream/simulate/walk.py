"""`Walk`: the rules for equal stages without copies or blocks, on sets of runs; the leaves of `compose`.

The same rules as in `judge`, which holds for everything; tests compare the two.
"""

from typing import TypeAlias

from tapestream.costs import Profile
from tapestream.ir import Action, Backward, Forward, Free, Keep, Phase, PhaseKind, Record, Restore
from tapestream.simulate.explain import broken
from tapestream.simulate.marks import Marks

Live: TypeAlias = int | None
Tally: TypeAlias = tuple[int, ...]
OUTSIDE = -1  # a live state outside the states that a node touches; one less when somebody else holds it too


class Walk:
    """The state of one step of a uniform chain: what is live, kept and recorded, bytes held and counts so far."""

    def __init__(self, profile: Profile) -> None:
        self.n = len(profile)
        self.cost = profile.stages[0]
        self.turn_nbytes = profile.turn_nbytes
        self.live: Live = None
        self.kept, self.tape = Marks(), Marks()
        self.next_backward = self.n - 1
        self.phase: PhaseKind | None = None
        self.phase_tallies: dict[PhaseKind, Tally] = {}
        self.nbytes = self.peak = profile.outside_nbytes
        self.position = self.peak_position = 0
        self.forwards = self.recorded = self.backwards = 0

    def end(self) -> None:
        """Check what must hold after the last action."""
        if self.phase is None or self.tape or self.kept:
            broken("at the end nothing may be kept or recorded, and something must have been done")
        if self.phase is PhaseKind.FORWARD:
            if self.recorded or self.live != self.n:
                broken(f"without Phase(BACKWARD) nothing is recorded and the live state at the end is {self.n}")
        elif self.next_backward >= 0:
            broken(f"Backward({self.next_backward}) and those below it are missing")
        self.phase_tallies[self.phase] = self.tally()

    def tally(self) -> Tally:
        """Forwards (recorded ones included), recorded stages, backwards so far."""
        return self.forwards, self.recorded, self.backwards

    def add(self, tally: Tally) -> None:
        """Count what a node did."""
        forwards, recorded, backwards = tally
        self.forwards += forwards
        self.recorded += recorded
        self.backwards += backwards
        self.next_backward -= backwards

    def held_besides_live(self, k: int) -> bool:
        """True when the device holds state ``k`` even if it is not live."""
        if k in self.kept:
            return True
        return (self.cost.reads_input and k in self.tape) or (self.cost.reads_output and k - 1 in self.tape)

    def obey(self, action: Action, by: int) -> None:
        """Check and apply the action, shifted by ``by`` stages."""
        if self.phase is None and not isinstance(action, Phase):
            broken("the first action must be Phase(FORWARD)")
        match action:
            case Forward(start, stop):
                self._forward(start + by, stop + by)
            case Record(stage):
                self._record(stage + by)
            case Backward(stage):
                self._backward(stage + by)
            case Keep(stage):
                k = stage + by
                if self.live != k or k in self.kept:
                    broken(f"the live state, not kept yet, must be {k}, and is {self.live}")
                self.kept.flip(k)
            case Restore(stage):
                k = stage + by
                if k not in self.kept:
                    broken(f"state {k} is not kept on DEVICE")
                self._drop_live()
                self.live = k
            case Free(value):
                k = value.index + by
                if k not in self.kept:
                    broken(f"STATE {k} is not kept on DEVICE, so there is nothing to free")
                self.kept.flip(k)
                self._drop_unless_held(k)
            case Phase(kind):
                self._enter(kind)
            case _:
                raise AssertionError(f"not for compose: {action}")
        self.position += 1

    def _touch(self, extra: int) -> None:
        if self.nbytes + extra > self.peak:
            self.peak, self.peak_position = self.nbytes + extra, self.position

    def _drop_unless_held(self, k: int) -> None:
        """A holder of state ``k`` other than the live one is gone."""
        if self.live != k and not self.held_besides_live(k):
            self.nbytes -= self.cost.output_nbytes

    def _drop_live(self) -> None:
        former, self.live = self.live, None
        if former is not None:
            self._drop_unless_held(former)

    def _make_live(self, k: int) -> None:
        """State ``k`` appears; the former live state is dropped by the caller when its run is over."""
        if not self.held_besides_live(k):
            self.nbytes += self.cost.output_nbytes

    def _forward(self, start: int, stop: int) -> None:
        if not 0 <= start < stop <= self.n or self.live != start:
            broken(f"0 <= start < stop <= {self.n} must hold and the live state, {self.live}, must be start")
        nbytes, extra = self.cost.output_nbytes, self.cost.forward_extra_nbytes
        fresh = not self.held_besides_live(start + 1)
        self._touch(fresh * nbytes + extra)
        self._drop_live()
        for k in range(start + 1, stop):
            fresh, before = not self.held_besides_live(k + 1), fresh
            self._touch((before + fresh) * nbytes + extra)
            if before and fresh:  # no later stage can take more
                break
        self._make_live(stop)
        self.live = stop
        self.forwards += stop - start

    def _record(self, k: int) -> None:
        if not 0 <= k < self.n or self.live != k or k in self.tape:
            broken(f"0 <= stage < {self.n} must hold, the live state must be {k}, and the stage not recorded yet")
        self._make_live(k + 1)
        self.nbytes += self.cost.saved_nbytes
        self.tape.flip(k)
        self._touch(self.cost.recorded_extra_nbytes)
        self.live = k + 1
        self._drop_unless_held(k)
        self.forwards += 1
        self.recorded += 1

    def _backward(self, k: int) -> None:
        if self.phase is not PhaseKind.BACKWARD or k != self.next_backward or k not in self.tape:
            broken(f"Backward({self.next_backward}) is next in the backward phase, and its stage must be recorded")
        if self.live == k + 1:
            self._drop_live()
        cost = self.cost
        self.nbytes += cost.gradient_nbytes
        self._touch(cost.cotangent_bytes + cost.backward_extra_nbytes)
        self.nbytes -= cost.saved_nbytes
        self.tape.flip(k)
        if cost.reads_input:
            self._drop_unless_held(k)
        if cost.reads_output:
            self._drop_unless_held(k + 1)
        self.next_backward -= 1
        self.backwards += 1

    def _enter(self, kind: PhaseKind) -> None:
        order = [None, *PhaseKind]
        if order.index(kind) != order.index(self.phase) + 1:
            broken("phases come once each, forward, backward, step")
        if self.phase is not None:
            self.phase_tallies[self.phase] = self.tally()
        if kind is PhaseKind.FORWARD:
            self.live = 0
            self.nbytes += self.cost.output_nbytes
            self._touch(0)
        elif kind is PhaseKind.BACKWARD:
            if self.live != self.n:
                broken(f"the live state must be {self.n}, the last, and is {self.live}")
            self.nbytes += self.cost.cotangent_bytes
            self._touch(self.turn_nbytes)
            self._drop_live()
        else:
            if self.next_backward >= 0:
                broken(f"Backward({self.next_backward}) and those below it must come before the step")
            self.nbytes -= self.cost.cotangent_bytes
        self.phase = kind
