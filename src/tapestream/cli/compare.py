"""``tapestream plan --compare``: all planners on one training step, as a table, as JSON and as a picture."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tapestream.cli import show
from tapestream.cli.changes import refusal
from tapestream.cli.machine import name as called
from tapestream.cli.subject import Subject
from tapestream.cli.told import told
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.question import Question
from tapestream.ir.actions import MEMORIES, Tier
from tapestream.planners import planners
from tapestream.planning import tradeoff
from tapestream.planning.compare import POINTS, Outcome, curves, outcomes, spaced
from tapestream.units import format_nbytes, format_seconds

_EVERYTHING = 1 << 60
"""Bytes: a device that holds whatever is trained."""


def compared(question: Question, plot: Path | None, title: str) -> tuple[list[Outcome[Answer]], dict[str, Any]]:
    """What each planner makes of the question, the fastest first, and all of it as JSON; ``plot``: where to draw the
    trade-off over budgets, with ``title``."""
    question.outlined()  # so that it counts in nobody's planning time
    with show.progress() as advance:
        found = outcomes(planners, question.plan, lambda what, done, of: advance(what, done, of, ""))
        document: dict[str, Any] = {"planners": [_figures(one) for one in found]}
        if plot is not None:
            everything = _everything(question)
            swept = _swept(question, everything, [one.planner for one in found if one.applies], advance)
            device = called(Tier.DEVICE, question.device)
            tradeoff.draw(
                plot, swept, allowed_nbytes=question.budget, stored_seconds=everything.seconds, device=device,
                title=title,
            )  # fmt: skip
            document["trade_off"] = {
                name: [{"peak_nbytes": nbytes, "seconds_per_step": seconds} for nbytes, seconds in points]
                for name, points in swept.items()
            }
    return found, document


def _swept(
    question: Question, everything: Answer, names: Sequence[str], advance: show.Advance
) -> dict[str, list[tuple[int, float]]]:
    """Device peaks and seconds by each planner for budgets between the least that works and what everything takes."""
    question = replace(question, gpu=None)
    least = refusal(replace(question, budget=1))
    low = (least and least.least_nbytes) or question.budget
    budgets = {*spaced(low, everything.peak_nbytes(Tier.DEVICE), POINTS), question.budget}
    swept = curves(
        names,
        sorted(nbytes for nbytes in budgets if nbytes >= low),
        lambda name, nbytes: replace(question, budget=nbytes).plan(name),
        lambda what, done, of: advance(what, done, of, ""),
        enough_seconds=everything.seconds,
    )
    return {name: [(one.peak_nbytes(Tier.DEVICE), one.seconds) for one in found] for name, found in swept.items()}


def _everything(question: Question) -> Answer:
    """A step with everything stored and resident on a device that is large enough."""
    return replace(question, budget=_EVERYTHING, gpu=None, home=Tier.DEVICE).plan("store_all")


def _figures(one: Outcome[Answer]) -> dict[str, Any]:
    answer = one.plan
    figures: dict[str, Any] = {"planner": one.planner, "applies": one.applies, "fits": answer is not None}
    if answer is not None:
        figures |= {
            "seconds_per_step": answer.seconds, "overhead": answer.overhead,
            "waiting_seconds": answer.waiting_seconds, "forwards": answer.forwards,
            "peak_nbytes": {tier.name.lower(): answer.peak_nbytes(tier) for tier in MEMORIES},
            "moved_nbytes": answer.moved_nbytes,
        }  # fmt: skip
    else:
        figures |= {"reason": told(one.reason), "least_nbytes": one.least_nbytes}
    return {**figures, "planning_seconds": one.planning_seconds}


def print_table(question: Question, subject: Subject, found: Sequence[Outcome[Answer]]) -> None:
    """The table, and below it why planners do not apply."""
    answers = [one.plan for one in found if one.plan is not None]
    tiers = [tier for tier in MEMORIES if tier is Tier.DEVICE or any(answer.peak_nbytes(tier) for answer in answers)]
    names = (called(tier, question.device) for tier in tiers)
    columns = ("planner", "a step", "overhead", "forwards", *names, "moved", "planned in")
    rows = [_row(one, tiers) for one in found]
    allowed = f"{format_nbytes(question.budget)} allowed on the {called(Tier.DEVICE, question.device)}"
    show.table(f"{subject.name}, {subject.step(question.batch)}: {len(found)} planners, {allowed}", rows, columns)
    for one in found:
        if not one.applies:
            show.line(
                f"{one.planner} does not apply: {told(one.reason).removeprefix(f'{one.planner} ').removeprefix(': ')}"
            )


def _row(one: Outcome[Answer], tiers: Sequence[Tier]) -> tuple[str, ...]:
    planning, answer = format_seconds(one.planning_seconds), one.plan
    if answer is None:
        least = f"needs {format_nbytes(one.least_nbytes)}" if one.least_nbytes else "RAM or disk too small"
        return (
            one.planner,
            least if one.applies else "does not apply",
            *("-" for _ in range(3 + len(tiers))),
            planning,
        )
    return (
        one.planner, format_seconds(answer.seconds), f"{answer.overhead:.2f}", str(answer.forwards),
        *(format_nbytes(answer.peak_nbytes(tier)) for tier in tiers), format_nbytes(answer.moved_nbytes), planning,
    )  # fmt: skip
