"""`Interpreter`: obeys a Schedule, action by action. It decides nothing.

Front-ends drive it by autograd: a Chain runs a whole phase at once, a streamed module one stage per block call.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator

import torch

from tapestream.errors import GradientError, ScheduleError
from tapestream.executor.moves import Blocks, Runs
from tapestream.executor.travel.parcel import Parcels
from tapestream.executor.travel.travel import Travel
from tapestream.ir.actions import (
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
    Update,
    Value,
    Wait,
)
from tapestream.ir.schedule import Schedule
from tapestream.runner.runner import Gradients
from tapestream.runner.state import State


class Interpreter:
    """One live call: the cursor in its schedule, the states, tapes and cotangents that exist now.

    ``sums`` maps the ``id`` of a parameter to (parameter, gradient accumulated so far in this call). ``moving``: stages
    whose saved tensors the schedule moves (see `moved_saved`); ``parcels`` (None: nothing moves by stage) owns what is
    below the device.
    """

    def __init__(
        self,
        schedule: Schedule,
        runner: Runs,
        *,
        blocks: Blocks | None = None,
        parcels: Parcels | None = None,
        moving: Container[int] = frozenset(),
    ) -> None:
        self.schedule, self.runner, self.blocks = schedule, runner, blocks
        self.travel = travel = Travel(parcels, runner.stages, moving)
        if parcels is not None and runner.hooks is None:
            stages = runner.stages  # not the runner itself, which would then hold itself
            runner.hooks = lambda k: travel.hooks(stages[k], k)
        self.live: State | None = None
        self.live_index = 0
        self.cotangents: dict[int, Gradients] = {}
        self.sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.begun: Callable[[int], Gradients] | None = None  # by stage: where the sums of its inputs' gradients begin
        self._actions: Iterator[Action] = iter(schedule)
        self._ahead: deque[Action] = deque()  # looked at already
        self._pending: Action | None = next(self._actions, None)
        self._entered: PhaseKind | None = None
        self._done = 0  # stages of a pending Forward
        self._keeping: int | None = None  # the stage whose next run keeps what it makes inside

    def close(self) -> None:
        """Drop what is kept, recorded and below the device (after an exception, or where nobody differentiates)."""
        self.live = None
        self.travel.clear()
        self.runner.inside.clear()
        self.cotangents.clear()

    # -- driving ------------------------------------------------------------------------------------------------

    def begin(self, state: State, waiting: Iterable[tuple[int, State]] = ()) -> None:
        """Take the caller's state 0 as the live state; ``waiting``: the inputs of other branches, which are kept."""
        self.live, self.live_index = state, 0
        for k, other in waiting:
            self.travel.keep(k, other)

    def hand_over(self, k: int) -> State:
        """Give the caller state ``k``, the last of a branch, at the end of the forward phase."""
        if self.live_index != k:
            return self.travel.kept.pop(k).state
        state, self.live = self._live(k), None
        return state

    def run_phase(self, kind: PhaseKind) -> None:
        """Every action up to the phase that follows ``kind``."""
        self._enter(kind)
        while self._pending is not None and not isinstance(self._pending, Phase):
            self._step()

    def run_stage(self, k: int) -> State:
        """Within the forward phase: up to and including the run of stage ``k``; returns state k+1.

        Copies that follow are started too, as far as they need no waiting; after the last stage the whole rest of the
        phase is run, since the room that it makes is counted on in the turn.
        """
        self._enter(PhaseKind.FORWARD)
        while self.live_index <= k:
            if self._pending is None or isinstance(self._pending, Phase):
                raise ScheduleError(f"the schedule's forward phase ends before stage {k}")
            self._step(one_stage=True)
        state = self.live
        assert state is not None
        last = k == len(self.runner.stages) - 1
        while self._pending is not None and not isinstance(self._pending, Phase) and (last or self._needs_no_wait()):
            self._step()
        if last and self.blocks is not None:
            self.blocks.forward_ended()
        return state

    def run_backward(self, k: int, cotangents: Gradients) -> Gradients:
        """Within the backward phase: up to and including Backward(k), given the cotangents of state k+1.

        Stages after ``k`` that were not asked for are dropped. After stage 0 the rest of the phase is run, where blocks
        move: others come next, who count on the room that it makes.
        """
        self._enter(PhaseKind.BACKWARD)
        while self._pending is not None and not isinstance(self._pending, Phase):
            if isinstance(self._pending, Backward):
                stage = self._pending.stage
                if stage < k:
                    break
                if stage == k:
                    self.cotangents[k + 1] = cotangents
                    self._step()
                    if k == 0 and self.blocks is not None:
                        self._run_rest()
                    else:
                        self._run_ahead()
                    return self.cotangents[k]
                self.cotangents[stage + 1] = []
            self._step()
        raise GradientError(
            f"backward reached {self.runner.stages[k].name} a second time; the saved tensors are gone after "
            "one backward "
            "(retain_graph=True is not supported), run the forward again"
        )

    def finish_backward(self) -> None:
        """The rest of the backward phase without what no one asked for: its copies, updates and frees alone."""
        self._enter(PhaseKind.BACKWARD)
        self._run_rest()
        self.close()

    def _run_rest(self) -> None:
        while self._pending is not None and not isinstance(self._pending, Phase):
            match self._pending:
                case Forward(start, stop):
                    self._let_come(range(start + self._done, stop))
                    self._done = 0
                    self._next()
                case Record(stage) | Backward(stage):
                    self._let_come((stage,), backward=isinstance(self._pending, Backward))
                    self._next()
                case Keep() | KeepInside() | Restore():
                    self._next()
                case Update(block) if not self._blocks().has_gradient(block):
                    self._next()
                case Offload(value, _, _) | Prefetch(value, _, _) | Wait(value, _) | Free(value, _) if (
                    value.kind.by_stage
                ):
                    self._next()
                case _:
                    self._step()

    def run_step(self) -> None:
        """The step phase alone."""
        while self._pending is not None and not _is_phase(self._pending, PhaseKind.STEP):
            self._next()
        if self._pending is not None:
            self._next()
        while self._pending is not None:
            self._step()

    def _enter(self, kind: PhaseKind) -> None:
        """Go on to phase ``kind``, finishing what is left of the phase before."""
        while self._pending is not None and not _is_phase(self._pending, kind):
            if isinstance(self._pending, Phase) or self._entered is kind:
                return
            self._step()
        if self._pending is not None:
            self._entered = kind
            self._next()
            if kind is PhaseKind.BACKWARD:
                self.live = None

    def _run_ahead(self) -> None:
        while self._needs_no_wait():
            self._step()

    def _needs_no_wait(self) -> bool:
        return isinstance(self._pending, (Offload, Prefetch, Free, Keep))

    def _next(self) -> None:
        self._pending = self._ahead.popleft() if self._ahead else next(self._actions, None)

    def _output_needed(self, k: int) -> bool:
        """Whether anything comes between the Record of stage ``k``, the pending action, and its Backward but copies
        and frees."""
        number = 0
        while True:
            if number == len(self._ahead):
                action = next(self._actions, None)
                if action is None:
                    return True
                self._ahead.append(action)
            match self._ahead[number]:
                case Backward(stage):
                    return stage != k
                case Forward() | Record() | Keep() | KeepInside() | Restore() | Phase():
                    return True
            number += 1

    # -- obeying ------------------------------------------------------------------------------------------------

    def _step(self, *, one_stage: bool = False) -> None:
        action = self._pending
        match action:
            case Forward(start, stop):
                first = start + self._done
                for k in range(first, first + 1 if one_stage else stop):
                    self._forward(k)
                    self._done += 1
                if self._done < stop - start:
                    return
                self._done = 0
            case Record(stage):
                self._record(stage)
            case Backward(stage):
                self._backward(stage)
            case Keep(stage):
                self.travel.keep(stage, self._live(stage))
            case KeepInside(stage):
                self._keeping = stage
            case Restore(stage):
                self.live, self.live_index = self.travel.restored(stage, self.runner.stages[stage].name), stage
            case Update(block, part, tier):
                self._blocks().update(block, part, tier)
            case Offload(value, source, target) | Prefetch(value, source, target):
                self._mover(value).start(value, source, target)
            case Wait(value, tier):
                self._mover(value).wait(value, tier)
            case Free(Value(Kind.INSIDE, stage)):
                self.runner.inside.pop(stage, None)
            case Free(value, tier):
                self._mover(value).free(value, tier)
            case _:
                raise ScheduleError(f"the executor met {action} inside a phase")
        self._next()

    def _forward(self, k: int) -> None:
        states = self._given(k)
        self._compute_begins(k)
        self.live = self.runner.forward(k, states, keep_inside=k == self._keeping)
        self._keeping = None
        self.live_index = k + 1
        self._compute_ended(k)

    def _record(self, k: int) -> None:
        states = self._given(k)
        self._compute_begins(k)
        needed = self._output_needed(k)
        out, tape = self.runner.record(k, states, output_needed=needed)
        self.travel.recorded(k, tape)
        self.live, self.live_index = out if needed else None, k + 1
        self._compute_ended(k)

    def _given(self, k: int) -> list[State]:
        """State ``k`` for the runner, which is held on to only while a stage of one part runs: see `Runner`."""
        states = [self._live(k)]
        if len(self.runner.stages[k].parts) > 1:
            self.live = None
        return states

    def _backward(self, k: int) -> None:
        if self.live_index == k + 1:
            self.live = None
        tape = self.travel.consume(k)
        given = self.cotangents.pop(k + 1)
        begun = self.begun(k) if self.begun is not None else []
        if not any(g is not None for g in given):
            self._let_come((k,), backward=True)
            self.cotangents[k] = begun or [None] * len(tape.inputs)
        else:
            self._compute_begins(k, backward=True)
            self.cotangents[k], pairs = self.runner.backward(k, tape, given, self.sums, begun)
            self.sums.update({id(leaf): (leaf, total) for leaf, total in pairs})
            del pairs  # whoever takes a sum over is then the only one that has it
            self._compute_ended(k)
        self.runner.forget(k)
        if self.blocks is not None:
            self.blocks.backward_ended(k, self.sums)

    def _live(self, k: int) -> State:
        if self.live is None or self.live_index != k:
            raise ScheduleError(f"the executor needs state {k}, but state {self.live_index} is live")
        return self.live

    def _mover(self, value: Value) -> Blocks | Travel:
        return self.travel if value.kind.by_stage else self._blocks()

    def _blocks(self) -> Blocks:
        if self.blocks is None:
            raise ScheduleError("the schedule moves parameter blocks, but this program streams none")
        return self.blocks

    def _let_come(self, stages: Iterable[int], *, backward: bool = False) -> None:
        """Of stages that this rank leaves out: where blocks are divided among ranks, each gathers what any of them
        needs."""
        for k in stages if self.blocks is not None and self.blocks.divided else ():
            self._compute_begins(k, backward=backward)
            self._compute_ended(k)

    def _compute_begins(self, k: int, *, backward: bool = False) -> None:
        if self.blocks is not None:
            self.blocks.compute_begins(k, backward=backward)

    def _compute_ended(self, k: int) -> None:
        if self.blocks is not None:
            self.blocks.compute_ended(k)


def _is_phase(action: Action, kind: PhaseKind) -> bool:
    return isinstance(action, Phase) and action.kind is kind
