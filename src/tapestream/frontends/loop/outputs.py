"""``outputs=``: what becomes of the second thing that a step returns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tapestream.errors import InputError
from tapestream.executor.loop.form import Form

_BLOCK = 16  # rows


class Collected:
    """Outputs of every ``every``-th step: stacked, summed in order, or handed to a function.

    ``tensors`` are those of the result; once the call has returned them the sink forgets them, since it lives as
    long as the loop's node, which they hold.
    """

    def __init__(self, how: str | Callable[[Any], object], every: int, steps: int | None) -> None:
        self.how, self.every, self.steps = how, every, steps
        self.form: Form | None = None
        self.early = how == "stack"
        self.differentiable = how in ("stack", "sum")
        self.results: list[Any] = []
        self._rows: list[Any] = []
        self._room = 0
        self._block: list[Sequence[torch.Tensor]] = []
        self._given: Sequence[torch.Tensor | None] = ()

    def wants(self, step: int) -> bool:
        """See `Sink`."""
        return (step + 1) % self.every == 0

    def add(self, step: int, output: Any) -> None:
        """See `Sink`."""
        form = self.form
        if form is None or not form.matches(output):
            form = self.form_of(step, output)
        leaves = form.leaves(output)
        if torch.is_grad_enabled() or callable(self.how):  # sums and stacks take no graph where none is recorded
            leaves = [_detached(leaf) for leaf in leaves]
        if self.how == "sum":
            self._sum(leaves)
        elif self.how == "stack":
            self._stack(step // self.every, leaves)
        elif callable(self.how):
            with torch.no_grad():
                found = self.how(form.build(leaves))
            if found is not None:
                self._rows.append(found)

    def afresh(self) -> "Collected":
        """The same, with nothing collected yet."""
        other = Collected(self.how, self.every, self.steps)
        other.form = self.form
        return other

    def form_of(self, step: int, output: Any) -> Form:
        """The form of all outputs. Raises InputError where this one is of another."""
        form = self.form
        if form is None:
            form = self.form = Form.of(output, "output")
        if not form.matches(output):
            raise InputError(
                f"Loop: the output of step {step} has {form.differences(output)}; outputs= needs the same structure, "
                "shapes and dtypes from every step"
            )
        return form

    def _sum(self, leaves: Sequence[Any]) -> None:
        if not self._rows:
            self._rows = [leaf.clone() for leaf in leaves]
        else:
            for total, leaf in zip(self._rows, leaves, strict=True):
                total.add_(leaf)

    def _stack(self, row: int, leaves: Sequence[Any]) -> None:
        place = row % _BLOCK
        if not place or not self._block or row >= self._room:
            self._make_room(row, leaves)
            # To take a row by its number takes as long as to copy a small one.
            self._block = [rows[row - place : row - place + _BLOCK].unbind(0) for rows in self._rows]
        for places, leaf in zip(self._block, leaves, strict=True):
            places[place].copy_(leaf)

    def _make_room(self, row: int, leaves: Sequence[Any]) -> None:
        """Rows up to ``row`` at least; twice as many as so far where the length of the run is not known."""
        if not self._rows:
            self._room = 1 if self.steps is None else self.steps // self.every
            self._rows = [leaf.new_empty((self._room, *leaf.shape)) for leaf in leaves]
        elif row >= self._room:
            self._room *= 2
            self._rows = [torch.cat((rows, torch.empty_like(rows))) for rows in self._rows]

    def take(self, steps: int) -> tuple[list[torch.Tensor], Callable[[Sequence[Any]], Any]]:
        """The result's tensors after ``steps`` steps, and what makes the result of them."""
        rows, self._rows, self._block, form = self._rows, [], [], self.form
        if callable(self.how):
            return [], lambda _: rows
        if form is None or not rows:  # none was taken
            return [], lambda _: None
        if self.how == "stack":
            rows = [found[: steps // self.every] for found in rows]
        return rows, form.build

    def arrived(self, cotangents: Sequence[torch.Tensor | None]) -> None:
        """The result's cotangents."""
        self._given = cotangents if any(g is not None for g in cotangents) else ()

    def cotangents(self, step: int) -> Sequence[torch.Tensor | None]:
        """See `Sink`."""
        if self.how != "stack":
            return self._given
        return [None if g is None else g[step // self.every] for g in self._given]


def sink_of(outputs: Any, every: int, steps: int | None) -> Collected | None:
    """The sink that ``outputs=`` and ``every=`` describe. Raises InputError for anything else."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InputError(f"Loop: every= is a whole number of at least 1, not {every!r}")
    if outputs is None:
        if every != 1:
            raise InputError(f"Loop: every={every} selects outputs, but none were asked for; give outputs= too")
        return None
    if outputs not in ("stack", "sum") and not callable(outputs):
        raise InputError(f"Loop: outputs= is 'stack', 'sum' or a function of an output, not {outputs!r}")
    return Collected(outputs, every, steps)


def check_tensors(sink: Collected, form: Form) -> None:
    """Only tensors can be stacked and summed."""
    for part in form.parts:
        if part.kind is not torch.Tensor and not callable(sink.how):
            raise InputError(f"Loop: outputs={sink.how!r} takes tensors, but {part.name} is {part}")


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf
