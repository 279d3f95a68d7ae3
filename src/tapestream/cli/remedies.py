"""What would make a step that fits faster, or leave more of the device: each tried by the judge."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tapestream.cli.changes import Change
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.question import Question
from tapestream.ir.actions import Tier
from tapestream.planning.remedy import that_help


@dataclass(frozen=True, slots=True)
class Helping:
    """A change, the plan with it, and how often that is run for the samples that were asked for: in smaller batches,
    whose gradients add up."""

    change: Change
    answer: Answer
    runs: int = 1

    @property
    def seconds(self) -> float:
        """Of all runs."""
        return self.runs * self.answer.seconds


def remedies(question: Question, found: Answer, *, every: bool) -> list[Helping]:
    """Those that save more than 1% of the seconds of ``found``, the fastest first. Only a loss in chunks is tried, and
    only where logits take much of the device, unless ``every`` remedy is asked for."""
    if not every and not _logits_fill(found):
        return []
    tried = []
    for change, asked, runs in _candidates(question) if every else _chunks(question):
        try:
            tried.append(Helping(change, asked.plan(), runs))
        except (BudgetError, InputError):
            continue
    return that_help(tried, found.seconds)


def _logits_fill(found: Answer) -> bool:
    """Whether logits and loss take a quarter of the device for a moment, where something is lost for want of room."""
    turn = max(plan.profile.turn_nbytes for plan in found.plans)
    return found.overhead > 1.01 and 4 * turn >= found.peak_nbytes(Tier.DEVICE)


def _chunks(question: Question) -> Iterator[tuple[Change, Question, int]]:
    chunked = question.in_chunks
    if chunked is not None:
        yield {"--loss-chunks": "auto"}, chunked, 1


def _candidates(question: Question) -> Iterator[tuple[Change, Question, int]]:
    yield from _chunks(question)
    if question.update == "step":
        yield {"--update": "backward"}, replace(question, update="backward"), 1
    if question.where == "device" and question.device != "cpu" and question.home in (None, Tier.HOST):
        yield {"--where": "host"}, replace(question, where="host"), 1
    gathers = question.update == "step" and question.home is not Tier.DEVICE  # else each is a step, or has no room
    for runs in (2, 4) if gathers else ():
        if question.batch % runs == 0:
            yield {"--batch": str(question.batch // runs)}, replace(question, batch=question.batch // runs), runs
    for name in question.tables_to_try:
        yield {"--tables": name}, replace(question, tables=(*question.tables, name)), 1
    if question.lora is None:
        yield {"--lora": "16"}, replace(question, lora=16), 1
