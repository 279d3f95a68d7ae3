"""Gradients of a Loop equal those of a plain Python loop bit for bit, whatever the step does."""

import pytest
from looping import KINDS, assert_equal, differentiated

OPTIONS = [
    {"planner": "revolve", "slots": 3},
    {"planner": "revolve", "slots": 2, "chunk": 4},
    {"planner": "bisection"},
    {"budget": "200KiB"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_a_plain_loop(kind, options):
    expected, _ = differentiated(kind, 23, None)
    found, _ = differentiated(kind, 23, options)
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_loops(kind, steps):
    expected, _ = differentiated(kind, steps, None)
    found, _ = differentiated(kind, steps, {"planner": "revolve", "slots": 1})
    assert_equal(found, expected)
