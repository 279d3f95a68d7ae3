"""Chains of very many blocks are planned as ones of few: the judge sees the whole chain."""

from dataclasses import replace

import pytest
import questions

from tapestream.costs import Profile
from tapestream.planning import auto
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan
from tapestream.planning.shortened import shortened
from tapestream.simulate import simulate


def _deep(seed: int, blocks: int = 96) -> questions.Question:
    question, times = questions.drawn(seed), blocks // 8
    return replace(question, blocks=blocks, card=question.card * times / 2, ram=question.ram * times)


def _planned(question: questions.Question, profile: Profile | None = None) -> Plan:
    return make_plan(profile or question.profile, question.budget, question.machine, update=question.update)


@pytest.mark.parametrize("seed", [0, 4, 7])
@pytest.mark.parametrize("width", [24, 50])
def test_what_fits_the_short_chain_fits_the_long_one(seed: int, width: int) -> None:
    question = _deep(seed)
    short = shortened(question.profile, width)
    assert short is not None
    assert len(short.profile) <= width
    plan = _planned(question, short.profile)
    schedule = short.lengthened(plan.schedule, question.blocks)
    found = simulate(schedule, question.profile, question.machine, question.budget)
    assert all(found.peak_nbytes[tier] <= nbytes for tier, nbytes in plan.simulation.peak_nbytes.items())
    assert found.bytes_moved == plan.simulation.bytes_moved
    assert found.makespan_seconds == pytest.approx(plan.seconds, rel=0.01)


@pytest.mark.parametrize("seed", [0, 4, 7])
def test_it_is_within_3_percent_of_the_search_over_all_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    question = _deep(seed)
    full = _planned(question)
    monkeypatch.setattr(auto, "_DEEP", 90)
    monkeypatch.setattr(auto, "_WIDTH", 48)
    plan = _planned(question)
    assert plan.simulation.backwards == question.blocks
    assert plan.seconds <= 1.03 * full.seconds


def test_blocks_that_several_stages_use_are_left_as_they_are() -> None:
    profile = _deep(0).profile
    stages = tuple(replace(stage, block=k // 2) for k, stage in enumerate(profile.stages))
    assert shortened(replace(profile, stages=stages), 10) is None
