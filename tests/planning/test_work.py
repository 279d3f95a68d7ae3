"""How much is looked at to find a plan."""

from dataclasses import replace

import pytest
import questions

from tapestream.ir import Schedule
from tapestream.planning import split
from tapestream.planning.choices import Terms
from tapestream.planning.split import Tapes, best_split


def test_tapes_that_take_too_long_are_not_made_ready_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leanest tape of a planner may run each stage many times: where another plan is known to take less than its
    computation, its blocks need no places. (Updates, which all tapes have, are not counted.)"""
    streamed: list[float] = []
    slower: list[float] = []
    streaming, best = split.streaming_of, best_split

    def noted(schedule: Schedule, terms: Terms) -> object:
        found = streaming(schedule, terms)
        streamed.append(float(found.seconds[-1]))
        return found

    def split_faster_than(tapes: Tapes, terms: Terms, faster_than: float = float("inf")) -> object:
        streamed.clear()
        found = best(tapes, terms, faster_than)
        slower.extend(seconds for seconds in streamed if seconds >= 2 * faster_than)
        return found

    monkeypatch.setattr(split, "streaming_of", noted)
    monkeypatch.setattr("tapestream.planning.search.best_split", split_faster_than)
    question = replace(questions.drawn(300), blocks=64, flops=2e12)
    assert question.plan() is not None
    assert not slower
