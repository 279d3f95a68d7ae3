"""`Interpreter`: the engine of a Chain, a Join or a chain of streamed blocks.

Front-ends drive it by autograd: a Chain runs a whole phase at once, a streamed module one stage per block call.
"""

from collections.abc import Container

from tapestream.errors import GradientError, ScheduleError
from tapestream.executor.engine import Engine
from tapestream.executor.joint import JointRunner
from tapestream.executor.segments import Between, Blocks
from tapestream.executor.stages import StageSegments
from tapestream.executor.travel.parcel import Parcels
from tapestream.executor.travel.travel import Travel
from tapestream.ir.actions import PhaseKind
from tapestream.ir.lowering import (
    BACKWARD,
    DROP,
    DROP_BLOCK,
    FORWARD,
    FREE,
    KEEP,
    KEEP_INSIDE,
    PHASE,
    RECORD,
    RECORD_LAST,
    RESTORE,
    START,
    START_BLOCK,
    TAKE,
    UPDATE,
    WAIT,
)
from tapestream.ir.schedule import Schedule
from tapestream.runner.runner import Gradients, Runner
from tapestream.runner.state import State

_NEED_NO_WAIT = frozenset((START, START_BLOCK, DROP, DROP_BLOCK, FREE, KEEP))
_OF_STATES = frozenset((KEEP, KEEP_INSIDE, TAKE, RESTORE, FREE, START, WAIT, DROP))


class Interpreter(Engine):
    """``moving``: stages whose saved tensors the schedule moves (see `moved_saved`); ``parcels`` (None: nothing moves
    by stage) owns what is below the device. ``between``: what a recompute does between stages (None: nothing).
    ``segments``: see `StageSegments`, which has the sums of gradients.
    """

    def __init__(
        self,
        schedule: Schedule,
        runner: Runner | JointRunner,
        *,
        blocks: Blocks | None = None,
        parcels: Parcels | None = None,
        moving: Container[int] = frozenset(),
        between: Between | None = None,
    ) -> None:
        self.runner, self.between = runner, between
        self.travel = travel = Travel(parcels, runner.stages, moving)
        self.segments = StageSegments(runner, travel, blocks, between)
        states = None if parcels is None else travel
        super().__init__(schedule, self.segments, states=states, blocks=blocks, inside=self.segments)
        travel.kept, travel.tapes = self.kept, self.tapes
        if parcels is not None and runner.hooks is None:
            stages = runner.stages  # not the runner itself, which would then hold itself
            runner.hooks = lambda k: travel.hooks(stages[k], k)
        self.sums = self.segments.sums

    def close(self) -> None:
        """Drop what is kept, recorded and below the device (after an exception, or where nobody differentiates)."""
        super().close()
        self.travel.clear()
        self.runner.inside.clear()

    def go_on(self, state: State) -> None:
        """The caller's code has made the live state another one, as ``between`` does in recomputes."""
        self.live = state

    def run_stage(self, k: int) -> State:
        """Within the forward phase: up to and including the run of stage ``k``; returns state k+1.

        Copies that follow are started too, as far as they need no waiting; after the last stage the whole rest of the
        phase is run, since the room that it makes is counted on in the turn.
        """
        self._enter(PhaseKind.FORWARD)
        while self.index <= k:
            if self.pending is None or self.pending[0] == PHASE:
                raise ScheduleError(f"the schedule's forward phase ends before stage {k}")
            self._step(one_stage=True)
        state: State = self.live
        last = k == len(self.runner.stages) - 1
        while self.pending is not None and self.pending[0] != PHASE and (last or self._needs_no_wait()):
            self._step()
        if last and self.blocks is not None:
            self.blocks.forward_ended()
        return state

    def pass_forward(self) -> None:
        """The forward phase of stages that this rank leaves out: what moves blocks, and what others need."""
        self._enter(PhaseKind.FORWARD)
        self._run_rest()
        if self.blocks is not None:
            self.blocks.forward_ended()

    def run_backward(self, k: int, cotangents: Gradients) -> Gradients:
        """Within the backward phase: up to and including Backward(k), given the cotangents of state k+1.

        Stages after ``k`` that were not asked for are dropped. After stage 0 the rest of the phase is run, where blocks
        move: others come next, who count on the room that it makes.
        """
        self.record_for_backward(k)
        self.cotangents[k + 1] = cotangents
        self._step()
        self._run_rest() if k == 0 and self.blocks is not None else self._run_ahead()
        found: Gradients = self.cotangents.pop(k)
        return found

    def record_for_backward(self, k: int) -> None:
        """Within the backward phase: up to Backward(k), so that what stage ``k`` saves is there."""
        self._enter(PhaseKind.BACKWARD)
        self.segments.recomputes = True
        stage = -1
        while self.pending is not None and self.pending[0] != PHASE:
            if self.pending[0] == BACKWARD:
                stage = self.pending[1] + self._offset
                if stage <= k:
                    break
                self.cotangents[stage + 1] = []
            self._step()
        if stage != k:
            raise GradientError(
                f"backward reached {self.runner.stages[k].name} a second time; the saved tensors are gone after "
                "one backward (retain_graph=True is not supported), run the forward again"
            )
        if self.index == k + 1:
            self.live = None

    def finish_backward(self) -> None:
        """The rest of the backward phase without what no one asked for: its copies, updates and frees alone."""
        self._enter(PhaseKind.BACKWARD)
        self.segments.recomputes = True
        self._run_rest()
        self.close()

    def run_step(self) -> None:
        """The step phase alone."""
        while self.pending is not None and not self._is_phase(PhaseKind.STEP):
            self._next()
        self.run_phase(PhaseKind.STEP)

    def _run_rest(self) -> None:
        blocks, pass_by = self.blocks, self.segments.pass_by
        while self.pending is not None and self.pending[0] != PHASE:
            what, place, stop, more = self.pending
            if what == FORWARD:
                pass_by(range(place + self._offset, stop + self._offset))
            elif what in (RECORD, RECORD_LAST, BACKWARD):
                pass_by((place + self._offset,), backward=what == BACKWARD)
            elif what not in _OF_STATES and (what != UPDATE or blocks is None or blocks.has_gradient(more[0])):
                self._step()
                continue
            self._next()

    def _run_ahead(self) -> None:
        while self._needs_no_wait():
            self._step()

    def _needs_no_wait(self) -> bool:
        if self.pending is None:
            return False
        if self.pending[0] == KEEP and self.between is not None and self._entered is PhaseKind.FORWARD:
            return False  # the caller may make another state of it first
        return self.pending[0] in _NEED_NO_WAIT
