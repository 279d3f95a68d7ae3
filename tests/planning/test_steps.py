"""The classic picture: what is held where and when, read off a schedule and its timeline."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import Link, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import Kind, Tier, Value
from tapestream.planning.auto import make_plan
from tapestream.planning.picture import _shares, figure_of
from tapestream.planning.steps import Move, draw_stages, held, moves

LINKS = Machine({(Tier.HOST, Tier.DEVICE): Link(0.5), (Tier.DEVICE, Tier.HOST): Link(0.25)})
DEVICE, HOST = Tier.DEVICE, Tier.HOST


@pytest.mark.parametrize(
    ("planner", "budget", "knobs"),
    [
        ("store_all", None, {}),
        ("revolve", None, {"slots": 3}),
        ("async_multistage", None, {"slots": 2, "interval": 4}),
        ("offload", 12, {}),
        ("h_revolve", None, {"slots": (2, 3)}),
    ],
)
def test_what_is_held_takes_the_bytes_of_the_timeline(
    planner: str, budget: int | None, knobs: dict[str, object]
) -> None:
    """A state takes one byte and saved tensors none, so the host holds as many bytes as lines are drawn there."""
    profile = Profile.uniform(20, backward_seconds=2.0, state_nbytes=1, saved_nbytes=0)
    plan = make_plan(profile, budget, LINKS, planner=planner, **knobs)
    timeline = plan.simulation.timeline
    found = held(plan.schedule, timeline.spans)
    assert any(one.tier is HOST for one in found) == (planner in ("async_multistage", "offload", "h_revolve"))
    for number, (at, nbytes) in enumerate(timeline.memory[HOST]):
        until = timeline.memory[HOST][number + 1][0] if number + 1 < len(timeline.memory[HOST]) else at
        middle = (at + until) / 2
        if until > at:
            assert sum(one.start <= middle < one.stop for one in found if one.tier is HOST) == nbytes
    recorded = [one for one in found if one.value.kind is Kind.SAVED and one.tier is DEVICE]
    assert {one.value.index for one in recorded} == set(range(20))
    assert all(one.start <= one.stop <= plan.seconds for one in found)


def test_a_restart_checkpoint_and_saved_tensors_by_hand() -> None:
    profile = Profile.uniform(3)
    plan = make_plan(profile, planner="revolve", slots=1)
    spans = plan.simulation.timeline.spans
    assert [*moves(spans)][:3] == [
        Move("Forward", 0.0, 2.0, 0, 2), Move("Record", 2.0, 3.0, 2, 3), Move("Backward", 3.0, 4.0, 3, 2),
    ]  # fmt: skip
    found = held(plan.schedule, spans)
    assert found[0].value == Value(Kind.SAVED, 2)
    assert (found[0].start, found[0].stop) == (3.0, 4.0)
    (kept,) = (one for one in found if one.value == Value(Kind.STATE, 0))
    assert (kept.start, kept.stop) == (0.0, pytest.approx(7.0, abs=1.0))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1)), min_size=1, max_size=20))
def test_shares_of_the_time_add_up(bars: list[tuple[float, float]]) -> None:
    at, apart = 0.0, []
    for gap, seconds in bars:  # as in a lane, one after the other
        apart.append((at + gap, seconds))
        at += gap + seconds
    shares = _shares(apart, at)
    assert sum(shares) * at / len(shares) == pytest.approx(sum(seconds for _, seconds in apart), abs=1e-6 * (at + 1))


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_stages_are_counted_in_whole_numbers(stages: int) -> None:
    axis = figure_of(4, 4).subplots()
    plan = make_plan(Profile.uniform(stages), planner="store_all")
    names = dict.fromkeys(Tier, "RAM")
    draw_stages(axis, plan.schedule, plan.simulation.timeline.spans, stages, 1.0, names)
    assert all(float(tick).is_integer() for tick in axis.get_yticks())


def test_long_chains_are_drawn_and_too_long_ones_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = make_plan(Profile.uniform(3000), 40, planner="revolve")
    plan.plot(tmp_path / "long.png")
    assert (tmp_path / "long.png").stat().st_size > 20_000
    with pytest.raises(InputError, match="too long"):
        make_plan(Profile.uniform(1_000_000), planner="store_all").plot(tmp_path / "longer.png")
