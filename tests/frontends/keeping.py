"""Plans that keep attention, of blocks so small that their times say nothing."""

from dataclasses import replace
from typing import Any

import pytest

from tapestream.costs import StageCost
from tapestream.ir import KeepInside
from tapestream.planning import stage_costs


def keep_whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a recompute that is given its attention counts as half as long."""
    monkeypatch.setattr(stage_costs, "INSIDE_SECONDS", 0.0)
    monkeypatch.setattr(stage_costs, "INSIDE_SHARE", -1.0)
    measured = stage_costs.with_inside

    def with_inside(*args: Any) -> StageCost:
        cost = measured(*args)
        return replace(cost, inside_seconds=0.5 * cost.recorded_seconds if cost.inside_nbytes else 0.0)

    monkeypatch.setattr(stage_costs, "with_inside", with_inside)


def kept(plan: Any) -> int:
    """How many runs keep their attention."""
    return sum(isinstance(action, KeepInside) for action in plan.schedule)
