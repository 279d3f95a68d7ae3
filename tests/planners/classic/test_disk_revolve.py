"""An unlimited second level, by table and by period."""

from itertools import pairwise
from tracemalloc import get_traced_memory, start, stop

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slots_search import least_seconds
from tiers import chain, machine

from tapestream.costs import Budget, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Offload, Tier, distinct_nodes
from tapestream.planners import planners
from tapestream.simulate import simulate

BOTH = ("disk_revolve", "periodic_disk_revolve")


def seconds(name, profile, links, **knobs):
    return simulate(planners[name](profile, None, links, **knobs), profile, links).makespan_seconds


@pytest.mark.parametrize("name", BOTH)
def test_published_makespans(name):
    links = machine((2,), (2,))
    found = [seconds(name, chain(n), links, slots=3) for n in (10, 20, 50, 100, 200)]
    assert found == [25, 63, 175, 363, 738]


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 6), slots=st.integers(1, 2), write=st.integers(1, 4), read=st.integers(1, 4),
    forward=st.integers(1, 5),
)  # fmt: skip
def test_equal_to_all_schedules(n, slots, write, read, forward):
    truth = least_seconds(n, slots, n, forward=forward, write=write, read=read)
    found = seconds("disk_revolve", chain(n, float(forward)), machine((write,), (read,)), slots=slots)
    assert found == pytest.approx(truth, abs=1e-9)


def test_as_h_revolve_with_slots_to_spare():
    links = machine((2,), (2,))
    for n in (7, 33, 60):
        assert seconds("disk_revolve", chain(n), links, slots=3) == seconds("h_revolve", chain(n), links, slots=(3, n))


@pytest.mark.parametrize(
    ("slots", "write", "read"), [(3, 2, 2), (3, 0.5, 0.5), (2, 10, 10), (3, 30, 1), (8, 20, 20), (1, 10, 1), (5, 5, 1)]
)
def test_the_period_is_as_good_as_the_table_in_the_long_run(slots, write, read):
    links = machine((write,), (read,))
    for n in (50, 173, 400, 1500):
        best, equal = (seconds(name, chain(n), links, slots=slots) for name in BOTH)
        assert best - 1e-6 <= equal <= best * (1 + 1 / n**0.5)
    assert equal <= 1.005 * best


def test_the_period_can_be_given_and_grows_with_the_cost_of_copies():
    def written(**knobs):
        schedule = planners["periodic_disk_revolve"](chain(300), None, knobs.pop("links", None), slots=3, **knobs)
        return [action.value.index for action in schedule if isinstance(action, Offload)]

    assert written(period=20)[:3] == [0, 20, 40]
    few, many = (written(links=machine((cost,), (cost,))) for cost in (15, 1))
    assert few[1] - few[0] > many[1] - many[0]


@pytest.mark.parametrize("name", BOTH)
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 60), device=st.integers(5, 70), state=st.integers(1, 5), saved=st.integers(0, 9),
    extra=st.integers(0, 4), read_output=st.booleans(),
)  # fmt: skip
def test_valid_within_the_budget_and_more_is_never_slower(name, n, device, state, saved, extra, read_output):
    cost = StageCost(1.0, 2.0, state, saved, reads_output=read_output, backward_extra_nbytes=extra)
    profile = Profile(chain(n).stages.__class__(cost, n), state)
    links = machine((3,), (2,))
    try:
        planners[name](profile, 1, links)
    except BudgetError as error:
        device = max(device, error.least_nbytes)
    found = []
    for more in (0, 3, 9, 40):
        schedule = planners[name](profile, device + more, links)
        found.append(simulate(schedule, profile, links, Budget(device + more)).makespan_seconds)
    assert all(more <= less + 1e-9 for less, more in pairwise(found))


def test_a_million_stages():
    start()
    schedule = planners["periodic_disk_revolve"](chain(1_000_000), None, machine((500,), (400,)), slots=6)
    assert next(iter(schedule))
    assert sum(1 for _ in distinct_nodes(schedule.root)) < 5000
    assert get_traced_memory()[1] < 50e6
    stop()


@pytest.mark.parametrize("name", BOTH)
def test_refusals(name):
    links = machine((2,), (2,))
    planner = planners[name]
    for bad in (0, -1, 2.5):
        with pytest.raises(InputError, match="slots must be a whole number of at least 1"):
            planner(chain(9), None, links, slots=bad)
    with pytest.raises(InputError, match="not 'device'"):
        planner(chain(9), None, links, tier="device")
    with pytest.raises(InputError, match="no link from HOST to DISK"):
        planner(chain(9), None, links, tier="disk")
    with pytest.raises(InputError, match="use planner 'rotor'"):
        planner(Profile((StageCost(1.0, 1.0, 1, 2), StageCost(1.0, 1.0, 1, 1)), 1), None, links)
    with pytest.raises(BudgetError, match="a HOST budget of 3 B"):
        planner(chain(100), Budget(host=3), links, slots=3)
    with pytest.raises(BudgetError, match="a DEVICE budget of 2 B") as caught:
        planner(chain(100), 2, links)
    least = caught.value.least_nbytes
    assert simulate(planner(chain(100), least, links), chain(100)).peak_nbytes[Tier.DEVICE] <= least
    if name == "disk_revolve":
        with pytest.raises(InputError, match="use planner 'periodic_disk_revolve'"):
            planner(chain(20_001), None, links, slots=3)
    else:
        with pytest.raises(InputError, match="period must be"):
            planner(chain(9), None, links, period=0)
