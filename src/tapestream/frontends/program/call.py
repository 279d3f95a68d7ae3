"""One live call of a program: its first sweep, and backward by replays."""

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tapestream.accelerator.memory import storage_nbytes
from tapestream.errors import GradientError, ScheduleError
from tapestream.executor.engine import Engine
from tapestream.executor.program.calls.seams import Deaf, heard_by
from tapestream.executor.program.noting.recorder import Recorder
from tapestream.executor.program.record.aliases import unseen
from tapestream.executor.program.record.keeper import Keeper, Kept, held_nbytes
from tapestream.executor.program.record.lessons import Lessons
from tapestream.executor.program.record.record import External, Record
from tapestream.executor.program.record.tape import Tape
from tapestream.executor.program.replay.moves import Moves, Spoilt
from tapestream.executor.program.replay.steps import ProgramSteps
from tapestream.frontends.program.orders import Reversal
from tapestream.frontends.program.results import found_in
from tapestream.frontends.program.waiting import Waiting
from tapestream.ir import Action, Schedule
from tapestream.runner.ambient import HostGenerators, TorchGenerators, as_recompute, unchanged_generators
from tapestream.runner.kernels import algorithms_not_tried
from tapestream.runner.modes import hooks_allowed

Again = Callable[[int], Sequence[Action]]
"""Actions that reverse the first so many stages from the state before the first one."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A program's first run: what it returned, what was noted of it, restart checkpoints, and the numbers of
    results. ``shown``: these, and what they are views of, by number, as far as they are values."""

    result: Any
    record: Record
    keeper: Keeper
    numbers: list[int]
    shown: dict[int, torch.Tensor]


def sweep(function: Callable[[], Any], record: Record, keeper: Keeper, recorder: Recorder) -> Sweep:
    """Run the program. Raises InputError and GradientError for what could not be differentiated by replays."""
    with algorithms_not_tried(keeper.device), recorder.listening():
        result = function()
    found = found_in(result)
    if recorder.along is not None:
        return Sweep(result, record, keeper, [], {})
    recorder.flush()
    shown = [*found, *(t._base for t in found if t._base is not None)]
    numbered = {n: t for t in shown if (n := recorder.numbers.of(t)) is not None and n >= 0}
    results = {id(t) for t in found}
    recorder.forget()
    for k, external in enumerate(record.externals):
        external.version = external.tensor._version
        if record.departed and not (external.leaf and external.requires):
            _let_go(~k, external, record)
    record.spoilt = record.spoilt or unseen(record)
    record.arrays.settle(record.saves)
    keeper.settle(record)
    return Sweep(result, record, keeper, [n for n, t in numbered.items() if id(t) in results], numbered)


def _let_go(number: int, external: External, record: Record) -> None:
    """Of a tensor that the program has made, perhaps, before it was noted, and of which the graph of the program itself
    may hold the record, now or when the caller writes into it."""
    if external.tensor.requires_grad:
        external.own = external.takes = True
        if not external.requires and _gains_by_another(number, external, record):
            record.spoilt = record.spoilt or (
                "a tensor made before this call differed from the last one came to require a gradient afterwards, by a "
                "write into another tensor that shares its memory"
            )
    external.tensor = external.held


def _gains_by_another(number: int, external: External, record: Record) -> bool:
    """Whether another one is written into between two uses of it."""
    writes = record.writes.get(external.storage, ())
    between = (k for k in writes if external.first_use < k < external.last_use)
    return any(number not in record.arguments_of(k) for k in between)


class Replays:
    """Brings back what stretches have saved, as the tape asks: last stretch first, by the actions of a schedule.

    Whoever asks in another order (a second backward, several devices) starts a schedule of its own from the state
    before the first stretch, which always stays. ``moves``: of a plan by which something does.
    """

    def __init__(
        self,
        found: Sweep,
        cuts: Sequence[int],
        reversal: Reversal,
        again: Again,
        tape: Tape,
        moves: Moves | None = None,
        lessons: Lessons | None = None,
    ) -> None:
        kept = found.keeper.kept
        self.record, self._again = found.record, again
        self.steps = ProgramSteps(found.record, cuts, found.keeper.device, tape.saved, lessons, moves)
        tape.often = self.steps.of_users
        stage_of = {operation: stage for stage, operation in enumerate(cuts)}
        self._first, self._tape = kept[0], weakref.ref(tape)
        self.engine = Engine(reversal.rerun, self.steps, states=moves)
        self.engine.kept.update({stage_of[operation]: one for operation, one in kept.items()})
        if moves is not None:
            moves.kept, tape.heed = self.engine.kept.get, len(found.record)
        self.waiting: Waiting | None = None
        self._last: int | None = None
        self._generators: TorchGenerators | None = None
        if reversal.before:
            with self._again_as_before():
                self._last = self.engine.bring()

    def begins(self) -> None:
        """A backward asks for something: when it has ended, see what is left."""
        if self.waiting is not None:
            self.waiting.begins()
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        tape = self._tape()
        if tape is not None and self.waiting is not None:  # somebody holds a result that it has not reached
            live = [] if self.engine.live is None else self.engine.live.tensors
            self.waiting.ended(held_by((*self.engine.kept.values(), self._first), self.record, tape, live))

    def bring(self, operation: int) -> None:
        """Record the stretch of ``operation`` again."""
        stage = bisect_right(self.steps.cuts, operation) - 1
        with self._again_as_before():
            if not self._reached(stage, operation):
                if self.steps.moves is not None:
                    self.steps.moves.abandon()
                self._last = self.steps.moves = None
                self.engine = Engine(Schedule.of(self._again(stage + 1), stage + 1), self.steps)
                self.engine.kept[0] = self._first
                if not self._reached(stage, operation):
                    raise ScheduleError(f"the schedule never records stage {stage}")
            self._heed()

    @contextlib.contextmanager
    def _again_as_before(self) -> Iterator[None]:
        """Inside, what is run again finds what the first sweep has found."""
        if self._last is None:
            self.record.spoilt = self.record.spoilt or self.record.arrays.why_spoilt()
        if self.record.spoilt is not None:
            raise GradientError(
                f"Program: {self.record.spoilt}, so the program cannot be replayed; use torch calls instead, or allow "
                "a budget that keeps all"
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(hooks_allowed())
            stack.enter_context(as_recompute())
            stack.enter_context(algorithms_not_tried(self.steps.device))
            if self.steps.draws:
                stack.enter_context(heard_by(Deaf()))
                stack.enter_context(unchanged_generators(own=[one for one, _ in self.record.own.values()]))
            if self.steps.users_code:
                stack.enter_context(_nothing_drawn())
            if self._generators is not None:
                self.record.restore(self._generators)
            yield
            if self.record.draws_nbytes:
                self._generators = self.record.generators()

    def _heed(self) -> None:
        """What moves has to go on when backward comes to another stretch, even if all is there for that."""
        tape = self._tape()
        if tape is not None:
            tape.heed = 0 if self.steps.moves is None or self._last is None else self.steps.cuts[self._last]

    def _reached(self, stage: int, operation: int) -> bool:
        """Go on until ``stage`` is to be reversed; False where that has been already."""
        while self._last is None or self._last > stage or operation not in self.steps.saved:
            if self._last is not None:
                self.steps.forget(self._last)
            try:
                following = self.engine.bring()
            except Spoilt:  # all is run again from the first state
                return False
            if following is None or following < stage:
                return False
            self._last = following
            if self.steps.moves is not None:
                self.steps.moves.reversed(following)
        return True


def held_by(kept: Iterable[Kept], record: Record, tape: Tape, live: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that restart checkpoints, the tape and a ``live`` state hold beside what is the caller's, each storage
    once."""
    held = held_nbytes(kept, record)
    saved = (tensor for found in tape.saved.values() for tensor, _ in found)
    there = [tensor.untyped_storage() for tensor in (*saved, *live) if tensor.layout is torch.strided]
    if there:
        others = {e.tensor.untyped_storage()._cdata for e in record.externals if e.tensor.layout is torch.strided}
        held |= {s._cdata: 0 if s._cdata in others else storage_nbytes(s) for s in there}
    return sum(held.values())


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Raise GradientError where what runs inside draws numbers that are not torch's: Python is run again in opaque
    operations alone, and these would draw others than before."""
    before = HostGenerators.capture()
    yield
    if not HostGenerators.capture().equals(before):
        raise GradientError(
            "Program: an autograd.Function, or a function that a torch call is given, draws from Python's or NumPy's "
            "generator, so its replay gave other numbers; draw outside and pass the numbers as arguments"
        )
