"""`first_fit`: the first tree that fits, though few of them are judged."""

from collections.abc import Iterator
from types import ModuleType

import pytest
from chains import chains
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import Profile
from tapestream.errors import BudgetError
from tapestream.ir import Node
from tapestream.planners import _fit, binomial, online, periodic, revolve
from tapestream.planners._fit import device_peak, first_fit


@settings(max_examples=25, deadline=None)
@given(chains(), st.data())
@pytest.mark.parametrize("planner", [periodic, revolve, binomial, online], ids=lambda module: module.NAME)
def test_it_is_what_judging_one_after_the_other_gives(
    planner: ModuleType, profile: Profile, data: st.DataObject
) -> None:
    trees: list[Node] = [root for _, root in planner.timed(profile)]
    peaks = [device_peak(root, profile) for root in trees]
    limit = data.draw(st.integers(1, max(1, *peaks)))
    expected = next((root for root, peak in zip(trees, peaks, strict=True) if peak <= limit), None)
    if expected is not None:
        assert first_fit("any", trees, profile, limit).root is expected
        return
    with pytest.raises(BudgetError) as refused:
        first_fit("any", trees, profile, limit)
    assert refused.value.least_nbytes == min(peaks)


def test_a_tree_is_made_and_judged_once_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Profile.uniform(12)
    profile = Profile(tuple(profile.stages), 1)
    made, judged = [], []

    def timed(profile: Profile) -> list[tuple[float, Node]]:
        made.append(profile)
        return periodic.timed(profile)

    def counted(root: Node, profile: Profile) -> int:
        judged.append(id(root))
        return device_peak(root, profile)

    monkeypatch.setattr(_fit, "device_peak", counted)
    budgets: Iterator[int] = iter(range(9, 30))
    found = [_fit.first_timed_fit("any", timed, profile, budget) for budget in budgets]
    assert len(made) == 1
    assert len(judged) == len(set(judged))
    assert found[-1] is _fit.first_timed_fit("any", timed, profile, 29)
