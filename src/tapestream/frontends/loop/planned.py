"""Plans of a loop for a call that is looked at and not made."""

from typing import Any

import torch

from tapestream.errors import InputError
from tapestream.executor.loop.form import Form
from tapestream.executor.loop.traits import Body, StepTraits
from tapestream.frontends.changed import Planned, changed
from tapestream.frontends.loop import arrays
from tapestream.frontends.loop.arguments import count_of, device_of
from tapestream.frontends.loop.call import Task
from tapestream.frontends.loop.compiled import with_chunks
from tapestream.frontends.loop.costs import StepCost
from tapestream.frontends.loop.inputs import source_of
from tapestream.frontends.loop.loop import Loop
from tapestream.frontends.loop.outputs import sink_of
from tapestream.planning.plan import Plan
from tapestream.planning.repeating import KeepsState


def planned_loop(loop: Loop, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
    """Two steps are looked at and one is measured, and all is as before. Raises InputError for a run of unknown
    length, and for a step whose attributes keep what the next one reads."""
    if kwargs.get("until") is not None:
        raise InputError("plan: with until= nobody knows how many steps there will be; plan a call with steps=")
    try:
        task, cost, count, unit = _costed(loop, *args, **{k: v for k, v in kwargs.items() if k != "until"})
    except KeepsState as refused:
        raise InputError(
            f"plan: a call of this loop has to run to be planned; make one, and read its .plan. {refused}"
        ) from None

    def plan(**options: Any) -> Plan:
        one = changed(loop, **options) if options else loop
        return one._chosen(cost, count, task.body, unit).plan

    return plan


def _costed(
    loop: Loop, state: Any, steps: int | None = None, *, inputs: Any = None, outputs: Any = None, every: int = 1,
    max_steps: int | None = None,
) -> tuple[Task, StepCost, int, int]:  # fmt: skip
    """The call's task, what one step costs, their number, and how many of them a stage is made of at least."""
    numpy = loop._adjoint is not None
    form = Form.of(arrays.as_arrays(state) if numpy else state)
    device = torch.device("cpu") if numpy else device_of(form, state, loop._stage.modules)
    source = arrays.source_of_arrays(inputs) if numpy else source_of(inputs, device)
    count = count_of(steps, source, None, max_steps)
    assert count is not None
    sink = sink_of(outputs, every, count)
    body = Body(loop._stage.function, form, StepTraits.bare(form), source, sink, device)
    if loop._adjoint is not None:
        task = Task(body, arrays.as_tensors(state), source, None, None, runner=arrays.runner_with(loop._adjoint))
        task, cost = arrays.looked(task, loop._stage, loop._adjoint, count, loop.verify)
        return task, cost, count, 1
    task = loop._known.looked(Task(body, state, source, sink, None), count, None)
    if loop._compiler is None:
        return task, loop._known.cost(task, count, None).step, count, 1
    found = loop._known.compiled(task, loop._compiler, count, loop.chunk)
    return with_chunks(task, loop._compiler, found), found.cost, count, found.length
