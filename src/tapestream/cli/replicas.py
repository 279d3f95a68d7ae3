"""What a step takes either way: one model for all machines, or one for each."""

from collections.abc import Mapping

from tapestream.cli.ranks import Ranks
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.question import Question
from tapestream.units import format_seconds

Seconds = Mapping[str, float | None]
"""Of a step, by way; None: it does not fit."""


def seconds_machines(ranks: Ranks, found: Answer, other: Question) -> Seconds:
    """Of a step where all machines share one model, and where each has the whole. ``other``: the way that was not
    asked for."""
    ways = ("replicate", "share") if ranks.replicate else ("share", "replicate")
    return {ways[0]: found.seconds, ways[1]: _seconds(other)}


def machines(ranks: Ranks, seconds: Seconds) -> str:
    """Who has the model, and what both ways take."""
    if ranks.replicate:
        return f"each has the whole model; where all share one (without --replicate) a step: {_told(seconds['share'])}"
    return f"all share one model; where each has the whole (--replicate) a step: {_told(seconds['replicate'])}"


def _seconds(question: Question) -> float | None:
    try:
        return question.plan().seconds
    except (BudgetError, InputError):
        return None


def _told(seconds: float | None) -> str:
    return "does not fit" if seconds is None else format_seconds(seconds)
