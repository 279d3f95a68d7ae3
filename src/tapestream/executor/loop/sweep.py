"""`Sweeps`: runs steps that keep nothing, a bare Python loop over the user's function."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tapestream.errors import InputError
from tapestream.executor.loop.late import Late
from tapestream.executor.loop.traits import Body, Sweep
from tapestream.runner.graph import root_of_graph
from tapestream.runner.guards import Guard, escaped

NAME = "a step of the loop"
_TOLD_EVERY = 64  # steps


class Sweeps:
    """``tick`` hears of steps done. ``first_run``: outputs still count. ``late``: what may begin to need a gradient."""

    def __init__(self, body: Body, tick: Callable[[int], None] | None = None) -> None:
        self.body, self.form, self.traits = body, body.form, body.traits
        self.first_run = True
        self.late = Late.of(body)
        self.reached, self.over = 0, False
        self.tick = tick
        self._root = root_of_graph()

    def sweep(self, state: Any, start: int, stop: int, ended: Callable[[Any], bool] | None = None) -> Any:
        """Steps start .. stop-1, keeping nothing, or fewer: up to the first whose state ``ended`` accepts.

        ``reached`` is then the number of steps made from the loop's beginning, ``over`` whether one was accepted.
        """
        if self.traits.sweep is Sweep.PLAIN and not (self.first_run and self.late):
            # In the forward of our node they are off: to enter a mode takes as long as a small step.
            if not torch.is_grad_enabled():
                return self.plain(state, start, stop, ended)
            with torch.no_grad():
                return self.plain(state, start, stop, ended)
        with torch.enable_grad():
            if self.traits.sweep is Sweep.GRAPH:
                return self.detached(self._swept(state, start, stop, self._on_fresh, ended))
            with saved_tensors_hooks(_keep_nothing, _refuse):
                return self.detached(self._swept(state, start, stop, self._on_fresh, ended))

    def plain(self, state: Any, start: int, stop: int, ended: Callable[[Any], bool] | None = None) -> Any:
        """The same as a bare loop runs it."""
        return self._swept(state, start, stop, self.body.function, ended)

    def _swept(
        self, state: Any, start: int, stop: int, function: Callable[..., Any], ended: Callable[[Any], bool] | None
    ) -> Any:
        """All steps at once, or so many that somebody hears of them now and then."""
        self.over, self.reached = False, stop
        if self.tick is None:
            return self._run_bare(state, start, stop, function, ended)
        size = self.body.chunk * max(1, _TOLD_EVERY // self.body.chunk)
        for first in range(start, stop, size):
            self.reached = min(first + size, stop)
            state = self._run_bare(state, first, self.reached, function, ended)
            self.tick(self.reached - first)
            if self.over:
                break
        return state

    def _run_bare(
        self, state: Any, start: int, stop: int, function: Callable[..., Any], ended: Callable[[Any], bool] | None
    ) -> Any:
        source, matches = self.body.source, self.form.matches
        if self.body.sink is not None or ended is not None:
            state = self._observed(state, start, stop, function, ended)
        elif source is None:
            for step in range(start, stop):
                state = function(state)
                if not matches(state):
                    raise self.form.changed(state, step)
        else:
            for step, x in enumerate(source.read(start, stop), start):
                state = function(state, x)
                if not matches(state):
                    raise self.form.changed(state, step)
        return state

    def _observed(
        self, state: Any, start: int, stop: int, function: Callable[..., Any], ended: Callable[[Any], bool] | None
    ) -> Any:
        """As `_run_bare`, with outputs to collect or a condition to ask."""
        sink, matches, first_run = self.body.sink, self.form.matches, self.first_run
        late = self.late.outputs
        xs = None if self.body.source is None else iter(self.body.source.read(start, stop))
        for step in range(start, stop):
            state = function(state) if xs is None else function(state, next(xs))
            if sink is not None:
                if type(state) is not tuple or len(state) != 2:  # as `paired`, without a call in each step
                    raise not_paired(state, step)
                state, output = state
                if first_run and sink.wants(step):
                    if late:
                        self._take(step, output)
                    else:
                        sink.add(step, output)
                output = None  # its graph is not to live beside that of the next step
            if not matches(state):
                raise self.form.changed(state, step)
            if ended is not None and ended(state):
                self.over, self.reached = True, step + 1
                break
        return state

    def _on_fresh(self, state: Any, *x: Any) -> Any:
        """A step from leaves of its own. Its graph ends with it: the next step makes another."""
        if self.traits.sweep is Sweep.PLAIN and not self.late:  # all have begun
            with torch.no_grad():
                return self.body.function(state, *x)
        if x and self.first_run and self.late and self.body.source is not None and self.body.source.differentiable:
            x = (self.body.source.fresh(x[0])[0],)
        found = self.body.function(self.detached(state, requires=True), *x)
        if self.body.sink is None:
            return self._left(found) if self.form.matches(found) else found
        if type(found) is tuple and len(found) == 2 and self.form.matches(found[0]):
            return self._left(found[0]), found[1]
        return found

    def _left(self, state: Any) -> Any:
        if self.late.states and self.first_run:
            self.traits = self.late.of_state(self.traits, self.form.leaves(state))
        return self.detached(state)

    def _take(self, step: int, output: Any) -> None:
        """The output of a step that runs the first time."""
        sink = self.body.sink
        assert sink is not None
        sink.add(step, output)
        if self.late.outputs and sink.form is not None:
            self.traits = self.late.of_output(self.traits, sink.form.leaves(output))

    def detached(self, state: Any, *, requires: bool = False) -> Any:
        """``state`` without its graph; its leaves that carry gradients require one again, if asked for."""
        fresh: dict[int, torch.Tensor] = {}
        leaves = list(self.form.leaves(state))
        for i, wanted in enumerate(self.traits.requires):
            leaf = leaves[i]
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in fresh:
                    fresh[id(leaf)] = self._entering(leaf) if wanted and requires else leaf.detach()
                leaves[i] = fresh[id(leaf)]
        return self.form.build(leaves)

    def _entering(self, leaf: torch.Tensor) -> torch.Tensor:
        """A tensor of the state at the step's border: it requires a gradient, and may be written into where needed."""
        if self.traits.guarded:
            return Guard.apply(self._root, leaf, NAME)  # type: ignore[no-untyped-call, no-any-return]
        return leaf.detach().requires_grad_()


def paired(found: Any, step: int) -> tuple[Any, Any]:
    """The state and the output that a step returned."""
    if type(found) is not tuple or len(found) != 2:
        raise not_paired(found, step)
    return found


def not_paired(found: Any, step: int) -> InputError:
    """A step has not returned a state and an output."""
    return InputError(
        f"Loop: outputs= was given, so step {step} must return (state, output); it returned "
        f"{type(found).__name__}{f' of {len(found)}' if isinstance(found, tuple) else ''}"
    )


def _keep_nothing(tensor: torch.Tensor) -> None:
    return None


def _refuse(nothing: None) -> torch.Tensor:
    raise escaped(NAME)
