"""A live call whose length is known when it has ended: restart checkpoints are chosen while it runs."""

from collections.abc import Callable
from typing import Any

from tapestream.errors import InputError
from tapestream.executor.engine import Engine
from tapestream.executor.loop.steps import TensorSteps
from tapestream.frontends.loop.arguments import ended_by
from tapestream.frontends.loop.call import Task, TensorCall
from tapestream.ir.actions import Free, Keep, Phase, PhaseKind
from tapestream.ir.schedule import Schedule, Series
from tapestream.planners.online import Online


class OpenCall(TensorCall):
    """Runs until ``until`` accepts a state, at most ``most`` steps (None: without limit)."""

    def __init__(
        self, task: Task, online: Online, until: Callable[[Any], Any], most: int | None, held: Callable[[], None]
    ) -> None:
        super().__init__(task, None, None, held)
        self._online, self._until, self._most = online, until, most

    def _forward(self, runner: TensorSteps, state: Any) -> Any:
        online, chunk = self._online, self.task.body.chunk
        kept: dict[int, Any] = {}
        start = 0
        while not runner.over:
            for action in online.advance():
                if isinstance(action, Free):
                    del kept[action.value.index]
                elif isinstance(action, Keep):
                    kept[action.stage] = runner.keep(state, action.stage)
            stop = start + chunk if self._most is None else min(start + chunk, self._most)
            if stop == start:
                raise exhausted(start)
            state = runner.sweep(state, start, stop, ended_by(self._until))
            start = runner.reached
        self.steps = runner.steps = start
        root = Series((Phase(PhaseKind.FORWARD), online.backward()))
        self.engine = Engine(Schedule(root, online.steps), runner)
        self.engine.run_phase(PhaseKind.FORWARD)
        self.engine.kept.update(kept)
        return state


def exhausted(steps: int) -> InputError:
    """A run that should have ended."""
    return InputError(
        f"Loop: after {steps} steps, the most that max_steps= or inputs= allow, until= was still not fulfilled; allow "
        "more, or check that the condition can be reached"
    )
