"""Plans of a program for a call that is looked at and not made."""

from typing import Any

from tapestream.costs import Budget
from tapestream.frontends.changed import Planned, changed
from tapestream.frontends.program.cuts import Borders
from tapestream.frontends.program.explain import looked_at
from tapestream.frontends.program.given import kind_of
from tapestream.frontends.program.leanest import leanest
from tapestream.frontends.program.plans import prepare, too_small
from tapestream.frontends.program.program import Program
from tapestream.planning.plan import Plan
from tapestream.runner.guards import places
from tapestream.runner.modes import unhooked


@unhooked(places)
def planned_program(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
    """The function runs once, and leaves no trace. Plans are those that a third call with these arguments follows, for
    which all planners were tried; of a program that was called before, those that the next one does. They raise
    BudgetError where none fits."""
    device = program._device_of((args, kwargs))
    known = program._prepared.get(kind_of((args, kwargs)))
    budget = program._live.whole(device, program._below_on(device).host_nbytes()).device_nbytes or 0
    found = looked_at("plan", lambda: program._whole(*args, **kwargs), device, budget, program._kinds).found
    borders, shape = (
        Borders(found.record, found.numbers, gradients_within=program.gradients_within),
        found.record.shape(),
    )
    looks = max(1, known.looks) if known is not None and known.shape == shape else 1

    def plan(**options: Any) -> Plan:
        one = changed(program, **options) if options else program
        below = one._below_on(device)
        room = one._live.whole(device, below.host_nbytes())
        if known is not None and not options and known.shape == shape and known.fits(room):
            assert known.plan is not None
            return known.plan
        prepared = prepare(borders, shape, room, one.planner, None, below)
        while prepared.plan is not None and prepared.looks < looks:
            prepared = prepare(borders, shape, room, one.planner, prepared, below)
        return prepared.plan or _leanest(borders, one.planner, room)

    return plan


def _leanest(borders: Borders, planner: str, room: Budget) -> Plan:
    """That of the minimum-memory fallback, which calls go by where no plan fits. Raises BudgetError."""
    budget = room.device_nbytes or 0
    nbytes, cuts, reversal = leanest(borders, planner, budget)
    if nbytes > budget:
        raise too_small(borders, planner, nbytes, budget)
    return Plan.judged(reversal.schedule, borders.profile(cuts), room, None)
