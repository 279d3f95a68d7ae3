"""`LoopDriver`: obeys the schedule of a loop of any length in constant memory. It decides nothing."""

from collections.abc import Generator
from typing import Any, Protocol

from tapestream.errors import ScheduleError
from tapestream.executor.loop import program
from tapestream.ir.actions import PhaseKind, Tier


class Steps(Protocol):
    """What runs the stages of a loop, each one step or a chunk of them. A live state is whatever it makes it."""

    def forward(self, state: Any, start: int, stop: int) -> Any:
        """State ``stop`` from state ``start``, keeping nothing."""

    def record(self, state: Any, stage: int) -> tuple[Any, Any]:
        """State ``stage + 1``, and the tape of the stage."""

    def backward(self, tape: Any, stage: int, cotangent: Any) -> Any:
        """The cotangent of state ``stage``."""

    def keep(self, state: Any) -> Any:
        """A restart checkpoint."""

    def restore(self, kept: Any, last: bool) -> Any:
        """The live state of a restart checkpoint; ``last``: it is used for the last time."""


class States(Protocol):
    """Moves restart checkpoints between tiers."""

    def start(self, kept: dict[int, Any], stage: int, source: Tier, target: Tier) -> None:
        """Start a copy of restart checkpoint ``stage``."""

    def wait(self, kept: dict[int, Any], stage: int, tier: Tier) -> None:
        """Until the copy is there; on DEVICE it becomes a restart checkpoint again."""

    def free(self, stage: int, tier: Tier) -> None:
        """Drop the copy in ``tier``."""


class LoopDriver:
    """One live call: the restart checkpoints, tapes and the cotangent that exist now, and the place in the schedule."""

    def __init__(self, orders: program.Program, steps: Steps, states: States | None = None) -> None:
        self.steps, self.states = steps, states
        self.kept: dict[int, Any] = {}
        self.tapes: dict[int, Any] = {}
        self.live: Any = None
        self.index = 0
        self.cotangent: Any = None
        self._running = self._run(orders)

    def forward(self, state: Any) -> Any:
        """The forward phase from state 0; returns the last state."""
        self.live, self.index = state, 0
        self._until(PhaseKind.FORWARD)
        self._until(PhaseKind.BACKWARD)
        state, self.live = self.live, None
        return state

    def backward(self, cotangent: Any) -> Any:
        """The backward phase from the last cotangent; returns the first."""
        self.cotangent = cotangent
        self._until(None)
        return self.cotangent

    def close(self) -> None:
        """Drop what is held now: the place in the schedule and the driver hold each other until the collector runs."""
        self._running.close()
        self.kept.clear()
        self.tapes.clear()
        self.live = self.cotangent = None

    def _until(self, kind: PhaseKind | None) -> None:
        found = next(self._running, None)
        if found is not kind:
            raise ScheduleError(f"a loop's schedule has a forward and a backward phase; found {found}, not {kind}")

    def _run(self, orders: program.Program) -> Generator[object, None, None]:
        steps, kept, tapes = self.steps, self.kept, self.tapes
        for row, offset in orders.rows():
            for what, place, stop, more in row:
                stage = place + offset
                if what == program.RECORD:
                    self._check(stage)
                    self.live, tapes[stage] = steps.record(self.live, stage)
                    self.index = stage + 1
                elif what == program.BACKWARD:
                    self.live = None
                    self.cotangent = steps.backward(tapes.pop(stage), stage, self.cotangent)
                elif what == program.FORWARD:
                    self._check(stage)
                    self.live = steps.forward(self.live, stage, stop + offset)
                    self.index = stop + offset
                elif what == program.KEEP:
                    self._check(stage)
                    kept[stage] = steps.keep(self.live)
                elif what == program.TAKE:
                    self.live = None
                    self.live, self.index = steps.restore(kept.pop(stage), True), stage
                elif what == program.RESTORE:
                    self.live = None
                    self.live, self.index = steps.restore(kept[stage], False), stage
                elif what == program.FREE:
                    del kept[stage]
                elif what == program.PHASE:
                    yield more
                else:
                    self._move(what, stage, more)

    def _check(self, stage: int) -> None:
        if self.index != stage:
            raise ScheduleError(f"the executor needs state {stage}, but state {self.index} is live")

    def _move(self, what: int, stage: int, more: Any) -> None:
        if self.states is None:
            raise ScheduleError("the schedule moves states to a slower tier, but this loop has none; give folder=")
        if what == program.START:
            self.states.start(self.kept, stage, *more)
        elif what == program.WAIT:
            self.states.wait(self.kept, stage, more)
        else:
            self.states.free(stage, more)
