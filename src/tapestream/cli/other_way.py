"""What a step would take the other way: updates in RAM or on the device, one model for all machines or one for each."""

from collections.abc import Mapping
from dataclasses import replace

from tapestream.cli.ranks import Ranks
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.question import Question
from tapestream.planning.where import Where
from tapestream.units import format_seconds

Seconds = Mapping[str, float | None]
"""Of a step, by way; None: it does not fit."""


def seconds_where(question: Question, found: Answer) -> Seconds:
    """Of a step with updates on the device and on the host."""
    other: Where = "device" if question.where == "host" else "host"
    return {question.where: found.seconds, other: _seconds(replace(question, where=other))}


def updates(where: Where, seconds: Seconds) -> str:
    """Where blocks are updated, and what both ways take."""
    if where == "host":
        return (
            f"in RAM, with the bits of torch's optimizer on the CPU; on the device a step: {_told(seconds['device'])}"
        )
    said = "on the device; in RAM (--where host, the bits of torch's optimizer on the CPU) a step"
    return f"{said}: {_told(seconds['host'])}"


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
