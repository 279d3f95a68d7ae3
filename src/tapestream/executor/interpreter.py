"""`Interpreter`: obeys a Schedule, action by action. It decides nothing.

Front-ends drive it by autograd: a Chain runs a whole phase at once, a streamed module one stage per block call.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from tapestream.errors import GradientError, ScheduleError
from tapestream.executor.parcel import Parcels
from tapestream.ir.actions import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Tier,
    Update,
    Value,
    Wait,
)
from tapestream.ir.schedule import Schedule
from tapestream.runner.guards import check_versions
from tapestream.runner.runner import Gradients, Runner, Tape
from tapestream.runner.state import State


class Blocks(Protocol):
    """What moves, lends and updates parameter blocks (None for programs whose parameters are the user's own)."""

    def start(self, value: Value, source: Tier, target: Tier) -> None: ...
    def wait(self, value: Value, tier: Tier) -> None: ...
    def free(self, value: Value, tier: Tier) -> None: ...
    def update(self, block: int) -> None: ...
    def has_gradient(self, block: int) -> bool: ...
    def compute_begins(self, stage: int) -> None: ...
    def compute_ended(self, stage: int) -> None: ...
    def backward_ended(self, stage: int, sums: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    state: State
    versions: tuple[int, ...]


class Interpreter:
    """One live call: the cursor in its schedule, the states, tapes and cotangents that exist now.

    ``sums`` maps the ``id`` of a parameter to (parameter, gradient accumulated so far in this call). ``tail``: the
    first of the stages that are recorded as one graph (see `tail_of`), None for none.
    """

    def __init__(
        self,
        schedule: Schedule,
        runner: Runner,
        *,
        blocks: Blocks | None = None,
        parcels: Parcels | None = None,
        tail: int | None = None,
    ) -> None:
        self.schedule, self.runner, self.blocks, self.parcels = schedule, runner, blocks, parcels
        self.live: State | None = None
        self.live_index = 0
        self.tail = tail
        self.kept: dict[int, _Kept] = {}
        self.tapes: dict[int, Tape] = {}
        self.cotangents: dict[int, Gradients] = {}
        self.sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._actions: Iterator[Action] = iter(schedule)
        self._ahead: deque[Action] = deque()  # looked at already
        self._pending: Action | None = next(self._actions, None)
        self._entered: PhaseKind | None = None
        self._inside = 0  # stages of a pending Forward that have been done

    # -- driving ------------------------------------------------------------------------------------------------

    def begin(self, state: State) -> None:
        """Take the caller's state 0 as the live state."""
        self.live, self.live_index = state, 0

    def run_phase(self, kind: PhaseKind) -> None:
        """Every action up to the phase that follows ``kind``."""
        self._enter(kind)
        while self._pending is not None and not isinstance(self._pending, Phase):
            self._step()

    def run_stage(self, k: int) -> State:
        """Within the forward phase: up to and including the run of stage ``k``; returns state k+1.

        Copies that follow are started too, as far as they need no waiting.
        """
        self._enter(PhaseKind.FORWARD)
        while self.live_index <= k:
            if self._pending is None or isinstance(self._pending, Phase):
                raise ScheduleError(f"the schedule's forward phase ends before stage {k}")
            self._step(one_stage=True)
        state = self.live
        assert state is not None
        self._run_ahead()
        return state

    def run_backward(self, k: int, cotangents: Gradients) -> Gradients:
        """Within the backward phase: up to and including Backward(k), given the cotangents of state k+1.

        Stages after ``k`` that were not asked for are dropped.
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
        while self._pending is not None and not isinstance(self._pending, Phase):
            match self._pending:
                case Forward() | Record() | Backward() | Keep() | Restore():
                    self._next()
                case Update(block) if not self._blocks().has_gradient(block):
                    self._next()
                case Offload(value, _, _) | Prefetch(value, _, _) | Wait(value, _) | Free(value, _) if (
                    value.kind.by_stage
                ):
                    self._next()
                case _:
                    self._step()
        self.live = None
        self.kept.clear()
        self.tapes.clear()
        self.cotangents.clear()

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
        while isinstance(self._pending, (Offload, Prefetch, Free, Keep)):
            self._step()

    def _next(self) -> None:
        self._pending = self._ahead.popleft() if self._ahead else next(self._actions, None)

    def _output_needed(self, k: int) -> bool:
        """Whether anything comes between the Record of stage ``k``, the pending action, and its Backward but copies
        and frees."""
        for number in itertools.count():
            if number == len(self._ahead):
                action = next(self._actions, None)
                if action is None:
                    return True
                self._ahead.append(action)
            match self._ahead[number]:
                case Backward(stage):
                    return stage != k
                case Forward() | Record() | Keep() | Restore() | Phase():
                    return True
        raise AssertionError("unreachable")

    # -- obeying ------------------------------------------------------------------------------------------------

    def _step(self, *, one_stage: bool = False) -> None:
        action = self._pending
        match action:
            case Forward(start, stop):
                first = start + self._inside
                for k in range(first, first + 1 if one_stage else stop):
                    self._forward(k)
                    self._inside += 1
                if self._inside < stop - start:
                    return
                self._inside = 0
            case Record(stage) if stage == self.tail:
                self._record_tail(stage)
            case Record(stage):
                self._record(stage)
            case Backward(stage):
                self._backward(stage)
            case Keep(stage):
                state = self._live(stage)
                self.kept[stage] = _Kept(state, state.versions)
            case Restore(stage):
                kept = self._kept(stage)
                self.live, self.live_index = kept.state, stage
            case Update(block):
                self._blocks().update(block)
            case Offload(value, source, target) | Prefetch(value, source, target):
                self._start(value, source, target)
            case Wait(value, tier):
                self._wait(value, tier)
            case Free(value, tier):
                self._free(value, tier)
            case _:
                raise ScheduleError(f"the executor met {action} inside a phase")
        self._next()

    def _forward(self, k: int) -> None:
        state = self._live(k)
        self._compute_begins(k)
        self.live = self.runner.forward(k, state)
        self.live_index = k + 1
        self._compute_ended(k)

    def _record(self, k: int) -> None:
        state = self._live(k)
        self._compute_begins(k)
        needed = self._output_needed(k)
        out, self.tapes[k] = self.runner.record(k, state, output_needed=needed)
        self.live, self.live_index = out if needed else None, k + 1
        self._compute_ended(k)

    def _record_tail(self, k: int) -> None:
        """Stage ``k`` and all after it; the last of their records is left pending."""
        states, self.live = [self._live(k)], None
        n = len(self.runner.stages)
        self.live, self.tapes[n - 1] = self.runner.record_tail(k, states)
        self.live_index = n
        for _ in range(k + 1, n):
            self._next()

    def _backward(self, k: int) -> None:
        if self.live_index == k + 1:
            self.live = None
        tape = self.tapes.pop(k)
        given = self.cotangents.pop(k + 1)
        first = tape.first
        if not any(g is not None for g in given):
            self.cotangents[first] = [None] * len(tape.inputs)
        else:
            self._compute_begins(k)
            self.cotangents[first], pairs = self.runner.backward(k, tape, given, self.sums)
            self.sums.update({id(leaf): (leaf, total) for leaf, total in pairs})
            self._compute_ended(k)
        for _ in range(first, k):  # one graph: its other backwards are done
            self._next()
        for stage in range(first, k + 1):
            self.runner.forget(stage)
        if self.blocks is not None:
            self.blocks.backward_ended(k, self.sums)

    def _live(self, k: int) -> State:
        if self.live is None or self.live_index != k:
            raise ScheduleError(f"the executor needs state {k}, but state {self.live_index} is live")
        return self.live

    def _kept(self, k: int) -> _Kept:
        kept = self.kept[k]
        check_versions(self.runner.stages[k].name, kept.versions, kept.state.versions)
        return kept

    def _blocks(self) -> Blocks:
        if self.blocks is None:
            raise ScheduleError("the schedule moves parameter blocks, but this program streams none")
        return self.blocks

    def _compute_begins(self, k: int) -> None:
        if self.blocks is not None:
            self.blocks.compute_begins(k)

    def _compute_ended(self, k: int) -> None:
        if self.blocks is not None:
            self.blocks.compute_ended(k)

    # -- transfers ----------------------------------------------------------------------------------------------

    def _start(self, value: Value, source: Tier, target: Tier) -> None:
        if not value.kind.by_stage:
            self._blocks().start(value, source, target)
        elif value.kind is Kind.STATE:
            if source is Tier.DEVICE:
                kept = self._kept(value.index)
                self._parcels().pack(value, kept.state)
            self._parcels().start(value, source, target)
        else:
            raise ScheduleError(f"the executor cannot move {value} yet: only states and parameter blocks")

    def _wait(self, value: Value, tier: Tier) -> None:
        if not value.kind.by_stage:
            self._blocks().wait(value, tier)
            return
        self._parcels().wait(value, tier)
        if tier is Tier.DEVICE:
            state = self._parcels().unpack(value)
            self.kept[value.index] = _Kept(state, state.versions)

    def _free(self, value: Value, tier: Tier) -> None:
        if not value.kind.by_stage:
            self._blocks().free(value, tier)
        elif value.kind is Kind.STATE and tier is Tier.DEVICE:
            del self.kept[value.index]
        else:
            self._parcels().free(value, tier)

    def _parcels(self) -> Parcels:
        if self.parcels is None:
            raise ScheduleError("the schedule moves states to a slower tier, but this program has none")
        return self.parcels


def _is_phase(action: Action, kind: PhaseKind) -> bool:
    return isinstance(action, Phase) and action.kind is kind
