"""A loop inside another front end: the plain Python loop that it stands for, in one graph."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tapestream.executor.loop.form import Form
from tapestream.executor.loop.sweep import paired
from tapestream.frontends.loop.arguments import fulfilled
from tapestream.frontends.loop.inputs import Inputs, Rows
from tapestream.frontends.loop.open_call import exhausted
from tapestream.frontends.loop.outputs import Collected, check_tensors

Condition = Callable[[Any], Any]


def run_inline(
    step: Callable[..., Any],
    state: Any,
    source: Inputs | None,
    sink: Collected | None,
    count: int | None,
    until: Condition | None,
) -> Any:
    """What the loop returns. Raises as it does: for states of another form, and where ``until`` is never fulfilled."""
    form, given = Form.of(state), _given(source)
    outputs = None if sink is None else _Outputs(sink)
    for number in itertools.count() if count is None else range(count):
        found = step(state, *next(given))
        state, output = (found, None) if outputs is None else paired(found, number)
        form.check(state, number)
        if outputs is not None:
            outputs.add(number, output)
        if until is not None and fulfilled(until, state):
            break
    else:
        if until is not None:
            raise exhausted(count or 0)
    return state if outputs is None else (state, outputs.result())


def _given(source: Inputs | None) -> Iterator[tuple[Any, ...]]:
    """The arguments of each step beside the state, with their graph."""
    if source is None:
        return itertools.repeat(())
    if isinstance(source, Rows):
        return ((x,) for x in source.attached())
    return ((x,) for number in itertools.count() for x in source.read(number, number + 1))


class _Outputs:
    """What becomes of the outputs, as in `Collected`."""

    def __init__(self, sink: Collected) -> None:
        self._sink, self._rows = sink, list[Sequence[Any]]()

    def add(self, step: int, output: Any) -> None:
        sink = self._sink
        if callable(sink.how):  # no gradient flows through it
            if sink.wants(step):
                sink.add(step, output)
            return
        if not sink.wants(step):
            return
        form = sink.form_of(step, output)
        leaves = form.leaves(output)
        check_tensors(sink, form)
        if sink.how == "sum" and self._rows:
            leaves = [total + leaf for total, leaf in zip(self._rows.pop(), leaves, strict=True)]
        self._rows.append(leaves)

    def result(self) -> Any:
        sink, rows = self._sink, self._rows
        if callable(sink.how):
            taken, build = sink.take(0)
            return build(taken)
        if not rows or sink.form is None:
            return None
        return sink.form.build(rows[0] if sink.how == "sum" else [torch.stack(one) for one in zip(*rows, strict=True)])
