"""What is known of a loop's steps: their traits, by watching the first two, and what they cost, by measuring one."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tapestream.executor.loop.form import Form
from tapestream.executor.loop.sweep import NAME, paired
from tapestream.executor.loop.traits import Beginning
from tapestream.frontends.loop.arguments import ended_by
from tapestream.frontends.loop.call import Task, casting
from tapestream.frontends.loop.compiled import LONGEST, Compiler, Measured, measured
from tapestream.frontends.loop.costs import StepCost, cost_of
from tapestream.frontends.loop.inputs import Feed
from tapestream.frontends.loop.look import look_at
from tapestream.frontends.loop.outputs import check_tensors
from tapestream.planning.repeating import KeepsState
from tapestream.runner.ambient import Autocast
from tapestream.runner.belongings import unchanged
from tapestream.runner.passable import check_modules
from tapestream.runner.stage import Stage, mode_of

Condition = Callable[[Any], Any]


@dataclass(slots=True)
class Cost:
    """What a step costs. ``unmeasured``: by what was planned, the seconds of calls since one was looked at last.
    ``beginning``: what is known of the gradients of its state."""

    step: StepCost
    unmeasured: dict[object, float] = field(default_factory=dict)
    beginning: Beginning = field(default_factory=Beginning)


class KnownSteps:
    """Of the step ``stage``; by shapes and modes."""

    def __init__(self, stage: Stage, *, verify: bool) -> None:
        self.stage, self.verify = stage, verify
        self._costs: dict[object, Cost] = {}
        self.threaded: dict[object, Any] = {}  # see `threaded.Threads`
        self.of_pairs = False  # of a state and what the step keeps: made by `threaded.Threads`
        self.keeps: KeepsState | None = None  # how it was refused, which `threaded.Threads` has taken
        self._compiled: dict[object, Measured] = {}

    def looked(self, task: Task, count: int | None, until: Condition | None) -> Task:
        """The task with what watching two steps shows."""
        check_modules(NAME, self.stage.modules)
        body, most = task.body, 2 if count is None else min(count, 2)
        feeds = [Feed.of(task.source, number) for number in range(most)]
        split = _alone if task.sink is None else paired
        with casting(Autocast.capture(body.device), body.device), _uncounted(until):
            look = look_at(
                self.stage, task.state, body.form, feeds, split, body.device,
                ended=ended_by(until), verify=self.verify,
            )  # fmt: skip
        if task.sink is not None:
            task.sink.form = Form.of(look.output, "output")
            check_tensors(task.sink, task.sink.form)
        body = replace(body, traits=look.traits)
        return replace(task, body=body, later=look.state, stage=self.stage)

    def cost(self, task: Task, count: int | None, until: Condition | None) -> Cost:
        """What one step costs, measured once for each combination of shapes and modes."""
        key = self.key(task), count == 1
        if key not in self._costs:
            with casting(Autocast.capture(task.body.device), task.body.device), _uncounted(until):
                self._costs[key] = Cost(cost_of(self.stage, task.body, task.later, count, ended=ended_by(until)))
        return self._costs[key]

    def key(self, task: Task) -> object:
        """What a step's cost depends on."""
        form, traits = task.body.form, task.body.traits
        leaves = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in traits.leaves)
        return (
            tuple(map(str, form.parts)), str(form.spec), traits.requires, traits.sweep, traits.stand_ins, leaves,
            mode_of(list(self.stage.modules)), Autocast.capture(task.body.device), task.body.device,
            task.sink is not None,
        )  # fmt: skip

    def compiled(self, task: Task, compiler: Compiler, count: int, chunk: int | None) -> Measured:
        """How long compiled chunks are, and what they cost."""
        key = self.key(task), min(count, LONGEST)
        if key not in self._compiled:
            self._compiled[key] = measured(task, self.stage, compiler, count, chunk)
        return self._compiled[key]


def _uncounted(until: Condition | None) -> contextlib.AbstractContextManager[None]:
    """What a condition keeps (how long it has waited, say) is afterwards as before."""
    return contextlib.nullcontext() if until is None else unchanged(Stage(0, until).modules, until)


def _alone(found: Any, step: int) -> tuple[Any, None]:
    return found, None
