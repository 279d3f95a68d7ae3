"""`Engine`: obeys the schedule of one live call, of any length, in constant memory. It decides nothing."""

from collections.abc import Iterable, Iterator
from typing import Any

from tapestream.errors import ScheduleError
from tapestream.executor.segments import Blocks, Inside, Mover, Segments, StageMover
from tapestream.ir.actions import Kind, PhaseKind, Tier, Value
from tapestream.ir.lowering import (
    BACKWARD,
    DROP,
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
    WAIT_BLOCK,
    Op,
    lowered,
)
from tapestream.ir.schedule import Schedule


class Engine:
    """The place in the schedule, and the states, tapes and cotangents that exist now.

    ``kept`` and ``tapes`` are on the device, by state and by stage. ``states`` moves them below it, ``blocks`` moves
    and updates parameter blocks, ``inside`` keeps what recomputes need not make again (None: this program has none).
    ``pending`` is the next action; its stage counts from the offset of its row.
    """

    def __init__(
        self,
        schedule: Schedule,
        segments: Segments,
        *,
        states: StageMover | None = None,
        blocks: Blocks | None = None,
        inside: Inside | None = None,
    ) -> None:
        self.stages = schedule.stages
        self.live: Any = None
        self.index = 0  # of the live state
        self.kept: dict[int, Any] = {}
        self.tapes: dict[int, Any] = {}
        self.cotangents: dict[int, Any] = {}
        self.blocks = blocks
        self._segments, self._states, self._inside = segments, states, inside
        self._entered: PhaseKind | None = None
        self._rows = iter(lowered(schedule))
        self._row: Iterator[Op] = iter(())
        self._offset = 0
        self.pending: Op | None = None
        self._next()

    def begin(self, state: Any, waiting: Iterable[tuple[int, Any]] = ()) -> None:
        """Take the caller's state 0 as the live state; ``waiting``: the inputs of other branches, which are kept."""
        self.live, self.index = state, 0
        for k, other in waiting:
            self.kept[k] = self._segments.keep(other, k)

    def hand_over(self, k: int) -> Any:
        """Give the caller state ``k``, the last of a branch, at the end of the forward phase."""
        if self.index != k:
            return self._segments.restore(self.kept.pop(k), k, last=True)
        return self._given(k).pop()

    def run_phase(self, kind: PhaseKind) -> None:
        """Every action up to the phase that follows ``kind``."""
        self._enter(kind)
        if self.pending is None or self.pending[0] == PHASE:
            return
        self._obey((self.pending,))
        self.pending = self._obey(self._row)
        while self.pending is None and (found := next(self._rows, None)) is not None:
            row, self._offset = found
            self._row = iter(row)
            self.pending = self._obey(self._row)

    def bring(self) -> int | None:
        """Every action up to the next Backward, which autograd runs itself. Returns its stage, None at the end, which
        an exception is too."""
        try:
            while self.pending is not None and self.pending[0] != BACKWARD:
                self._step()
        except BaseException:
            self._rows, self._row, self.pending = iter(()), iter(()), None
            raise
        if self.pending is None:
            return None
        stage = self.pending[1] + self._offset
        if self.index == stage + 1:
            self.live = None
        self.tapes.pop(stage, None)
        self._next()
        return stage

    def close(self) -> None:
        """Drop what is kept and recorded (after an exception, or where nobody differentiates)."""
        self.live = None
        self.kept.clear()
        self.tapes.clear()
        self.cotangents.clear()

    # -- one after the other ------------------------------------------------------------------------------------

    def _enter(self, kind: PhaseKind) -> None:
        """Go on to phase ``kind``, finishing what is left of the phase before."""
        while self.pending is not None and not self._is_phase(kind):
            if self.pending[0] == PHASE or self._entered is kind:
                return
            self._step()
        if self.pending is not None:
            self._entered = kind
            self._next()
            if kind is PhaseKind.BACKWARD:
                self.live = None

    def _is_phase(self, kind: PhaseKind) -> bool:
        return self.pending is not None and self.pending[0] == PHASE and self.pending[3] is kind

    def _step(self, *, one_stage: bool = False) -> None:
        """Obey the pending action, of a Forward the first stage alone if asked for."""
        assert self.pending is not None
        what, place, stop, _ = self.pending
        if one_stage and what == FORWARD and stop > place + 1:
            self._obey(((FORWARD, place, place + 1, None),))
            self.pending = FORWARD, place + 1, stop, None
        else:
            self._obey((self.pending,))
            self._next()

    def _next(self) -> None:
        """Leave the pending action as it is."""
        self.pending = next(self._row, None)
        while self.pending is None and (found := next(self._rows, None)) is not None:
            row, self._offset = found
            self._row = iter(row)
            self.pending = next(self._row, None)

    # -- obeying ------------------------------------------------------------------------------------------------

    def _obey(self, ops: Iterable[Op]) -> Op | None:
        """Obey actions in order, up to a phase, which is returned."""
        segments, kept, tapes, offset = self._segments, self.kept, self.tapes, self._offset
        for op in ops:
            what, place, stop, more = op
            stage = place + offset
            if what <= RECORD_LAST:
                self.live, tapes[stage] = segments.record(self._given(stage), stage, output_needed=what == RECORD)
                self.index = stage + 1
            elif what == BACKWARD:
                if self.index == stage + 1:
                    self.live = None
                self.cotangents[stage] = segments.backward(tapes.pop(stage), stage, self.cotangents.pop(stage + 1))
            elif what == FORWARD:
                stop += offset
                self.live = segments.forward(self._given(stage), stage, stop)
                self.index = stop
            elif what == KEEP:
                if self.index != stage or self.live is None:
                    raise self._not_live(stage)
                kept[stage] = segments.keep(self.live, stage)
            elif what <= RESTORE:
                self.live = None
                self.live, self.index = segments.restore(kept[stage], stage, last=what == TAKE), stage
                if what == TAKE:
                    self._free(stage)
            elif what == FREE:
                self._free(stage)
            elif what == PHASE:
                return op
            else:
                self._move(what, stage, more)
        return None

    def _given(self, stage: int) -> list[Any]:
        """The live state, which nothing here holds any more."""
        if self.index != stage or self.live is None:
            raise self._not_live(stage)
        given, self.live = [self.live], None
        return given

    def _not_live(self, stage: int) -> ScheduleError:
        return ScheduleError(f"the executor needs state {stage}, but state {self.index} is live")

    def _free(self, stage: int) -> None:
        """Of a restart checkpoint what is on the device."""
        if self._states is None or not self._states.holds(Value(Kind.STATE, stage)):
            del self.kept[stage]
        else:
            self._states.free(Value(Kind.STATE, stage), Tier.DEVICE)

    def _move(self, what: int, stage: int, more: Any) -> None:
        """What concerns copies, parameter blocks and what is kept inside."""
        if what == KEEP_INSIDE:
            self._insides().keep_inside(stage)
        elif what == UPDATE:
            self._blocks().update(*more)
        elif what == DROP and more[0].kind is Kind.INSIDE:
            self._insides().free_inside(stage)
        elif what == DROP and more[0].kind is Kind.SAVED and more[1] is Tier.DEVICE and self._states is None:
            self.tapes.pop(stage, None)
        else:
            value, *tiers = more
            by_stage = what in (START, WAIT, DROP)
            mover = self._stage_mover() if by_stage else self._blocks()
            value = Value(value.kind, stage, value.part) if by_stage else value
            if what in (START, START_BLOCK):
                mover.start(value, *tiers)
            elif what in (WAIT, WAIT_BLOCK):
                mover.wait(value, *tiers)
            else:
                mover.free(value, *tiers)

    def _stage_mover(self) -> Mover:
        if self._states is None:
            raise ScheduleError("the schedule moves states to a slower tier, but this program has none; give folder=")
        return self._states

    def _blocks(self) -> Blocks:
        if self.blocks is None:
            raise ScheduleError("the schedule moves parameter blocks, but this program streams none")
        return self.blocks

    def _insides(self) -> Inside:
        if self._inside is None:
            raise ScheduleError("the schedule keeps what stages make inside, but this program does not know that")
        return self._inside
