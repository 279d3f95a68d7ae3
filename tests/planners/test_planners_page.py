"""docs/planners.md knows every planner, and says rightly whether it moves values and takes unequal stages."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
from tiers import machine

from tapestream.costs import Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Offload
from tapestream.planners import planners

PAGE = (Path(__file__).parents[2] / "docs" / "planners.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("`"): cells
    for line in PAGE.splitlines()
    if line.startswith("| `") and (cells := [cell.strip() for cell in line.strip("|").split(" | ")])
}


def test_every_planner_has_a_row_and_a_paragraph() -> None:
    assert set(ROWS) == set(planners)
    assert set(re.findall(r"^\*\*`(\w+)`\*\*", PAGE, re.MULTILINE)) == set(planners)
    assert all(len(cells) == 7 for cells in ROWS.values())


@pytest.mark.parametrize("name", planners)
def test_what_moves_and_what_takes_equal_stages_only(name: str) -> None:
    links = machine((0.5,), (0.5,))
    equal = Profile((StageCost(1.0, 2.0, 1, 2),) * 16, 1)
    moved = False
    for budget in (8, 12, 24):
        with suppress(BudgetError):
            moved = moved or any(isinstance(action, Offload) for action in planners[name](equal, budget, links))
    assert moved == (ROWS[name][6] == "yes")
    unequal = Profile((*equal.stages, StageCost(2.0, 1.0, 3, 4)), 1)
    try:
        planners[name](unequal, None, links)
        refused = False
    except InputError:
        refused = True
    assert refused == ROWS[name][2].startswith("equal stages")
