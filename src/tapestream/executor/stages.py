"""`StageSegments`: the stages of a Chain, a Join or a chain of streamed blocks, as the engine runs them."""

from collections.abc import Callable, Iterable

from tapestream.executor.joint import JointRunner, JointTape
from tapestream.executor.segments import Between, Blocks, Onward, Sums
from tapestream.executor.travel.travel import Kept, Travel
from tapestream.runner.entry import Tape
from tapestream.runner.runner import Gradients, Runner
from tapestream.runner.state import State


class StageSegments:
    """See `Segments` and `Inside`. Parameter blocks come before a stage runs, and may go after it.

    ``sums`` maps the ``id`` of a parameter to (parameter, gradient accumulated so far in this call). ``begun`` says, by
    stage, where the sums of the gradients of its inputs begin (None: with nothing). ``recomputes``: the backward phase
    has begun.
    """

    def __init__(
        self, runner: Runner | JointRunner, travel: Travel, blocks: Blocks | None, between: Between | None
    ) -> None:
        self.sums: Sums = {}
        self.begun: Callable[[int], Gradients] | None = None
        self.recomputes = False
        self._runner, self._travel, self._blocks, self._between = runner, travel, blocks, between
        self._keeping: int | None = None  # the stage whose next run keeps what it makes inside

    def forward(self, live: list[State], start: int, stop: int) -> State:
        """See `Segments`."""
        for k in range(start, stop):
            live, onward = self._of_its_own(live, k)
            held = self._held(live, k)
            self._compute_begins(k)
            live = [self._runner.forward(k, live, keep_inside=k == self._keeping)]
            if onward is not None:
                live = [onward(live.pop(), saving=False)]
            del held, onward
            self._keeping = None
            self._compute_ended(k)
        return live.pop()

    def record(self, live: list[State], stage: int, *, output_needed: bool) -> tuple[State | None, Tape | JointTape]:
        """See `Segments`."""
        live, onward = self._of_its_own(live, stage)
        held = self._held(live, stage)
        self._compute_begins(stage)
        needed = output_needed or (onward is not None and onward.saves)
        out, tape = self._runner.record(stage, live, output_needed=needed)
        self._travel.recorded(stage)  # while states are held
        if onward is not None and out is not None and needed:
            out = onward(out, saving=True)
        del held
        self._compute_ended(stage)
        return out if needed else None, tape

    def backward(self, tape: Tape | JointTape, stage: int, cotangent: Gradients) -> Gradients:
        """See `Segments`."""
        self._travel.consumed(stage)
        begun = self.begun(stage) if self.begun is not None else []
        if not any(g is not None for g in cotangent):
            self.pass_by((stage,), backward=True)
            found = begun or [None] * len(tape.inputs)
        else:
            self._compute_begins(stage, backward=True)
            found, pairs = self._runner.backward(stage, tape, cotangent, self.sums, begun)  # type: ignore[arg-type]
            self.sums.update({id(leaf): (leaf, total) for leaf, total in pairs})
            del pairs  # whoever takes a sum over is then the only one that has it
            self._compute_ended(stage)
        self._runner.forget(stage)
        if self._blocks is not None:
            self._blocks.backward_ended(stage, self.sums)
        return found

    def keep(self, state: State, stage: int) -> Kept:
        """See `Segments`."""
        return Kept.of(state)

    def restore(self, kept: Kept, stage: int, *, last: bool) -> State:
        """See `Segments`. Raises GradientError if the state was written into."""
        self._travel.check(stage, kept)
        return kept.state

    def keep_inside(self, stage: int) -> None:
        """See `Inside`."""
        self._keeping = stage

    def free_inside(self, stage: int) -> None:
        """See `Inside`."""
        self._runner.inside.pop(stage, None)

    def pass_by(self, stages: Iterable[int], *, backward: bool = False) -> None:
        """This rank leaves stages out: where blocks are divided among ranks, each gathers what any of them needs."""
        for k in stages if self._blocks is not None and self._blocks.divided else ():
            self._compute_begins(k, backward=backward)
            self._compute_ended(k)

    def _of_its_own(self, live: list[State], k: int) -> tuple[list[State], Onward | None]:
        """The state that stage ``k`` runs on, and in a recompute what makes state k+1 of what it makes, if anything
        does."""
        if self._between is None:
            return live, None
        state = live.pop()
        own = self._between.come_in(k, state)
        return [own], self._between.behind(k, state, own) if self.recomputes else None

    def _held(self, live: list[State], k: int) -> State | None:
        """State ``k``, which is held on to only while a stage of one part runs: see `Runner`."""
        return live[0] if len(self._runner.stages[k].parts) == 1 else None

    def _compute_begins(self, k: int, *, backward: bool = False) -> None:
        if self._blocks is not None:
            self._blocks.compute_begins(k, backward=backward)

    def _compute_ended(self, k: int) -> None:
        if self._blocks is not None:
            self._blocks.compute_ended(k)
