"""The least changes with which a training step fits that does not."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from tapestream.errors import BudgetError, InputError
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.question import Question
from tapestream.ir.actions import Tier

Change: TypeAlias = dict[str, str]
"""Options and the values that they would have to have."""

_QUICK = "revolve"  # where only the yes or no counts, one planner is enough
_TRIES = 4


def changes_that_fit(question: Question, refusal: BudgetError) -> Iterator[tuple[Change, Answer]]:
    """Changes that make ``question`` fit, each tried, the cheapest kind first, each with a plan (not the fastest)."""
    for change, asked in _candidates(question, refusal):
        try:
            yield change, asked.plan(_QUICK)
        except (BudgetError, InputError):  # some do not go together, such as updates in RAM and all on the disk
            continue


def _candidates(question: Question, refusal: BudgetError) -> Iterator[tuple[Change, Question]]:
    gpu, least = question.gpu, refusal.least_nbytes
    if gpu is not None and question.budget > gpu:
        yield {"--budget": _text(gpu)}, replace(question, budget=gpu)
    chunked = question.in_chunks
    if chunked is not None:
        yield {"--loss-chunks": "auto"}, chunked
    for name in question.tables_to_try:
        yield {"--tables": name}, replace(question, tables=(*question.tables, name))
    other = "backward" if question.update == "step" else "step"
    yield {"--update": other}, replace(question, update=other)
    smaller = _smaller_batch(question)
    if smaller is not None:
        yield {"--batch": str(smaller)}, replace(question, batch=smaller)
    yield from _more_room(question)
    if least is not None and least > question.budget:
        yield from _larger_device(question, least)


def _larger_device(question: Question, least: int) -> Iterator[tuple[Change, Question]]:
    """A larger budget (and device, where it is too small), with the update as asked, else with the other."""
    other = "backward" if question.update == "step" else "step"
    for update in (question.update, other):
        nbytes = least
        for _ in range(_TRIES):
            text = _text(nbytes)
            larger, change = replace(question, budget=_mebibytes(text), update=update), {"--budget": text}
            if question.gpu is not None and larger.budget > question.gpu:
                larger, change = (
                    replace(larger, gpu=larger.budget),
                    {**change, _device_option(question): text},
                )
            if update != question.update:
                change["--update"] = update
            missing = refusal(larger)
            if missing is None:
                yield change, larger
                return
            # The least that was found is another planner's, and rounded; a split of it may take a little more.
            nbytes = max(missing.least_nbytes or 0, nbytes * 105 // 100)


def _device_option(question: Question) -> str:
    """What says how much the device has."""
    return "--ram" if question.device == "cpu" else "--gpu"


def _more_room(question: Question) -> Iterator[tuple[Change, Question]]:
    """Where RAM or the disk is what is missing: as much as the step takes there."""
    # RAM without end would move everything there, so the home stays as it is.
    fixed = replace(question, home=Tier.DISK if question.homes.use(Tier.DISK) else question.home)
    if question.ram is not None:
        text = _needed(replace(fixed, ram=None), Tier.HOST)
        if text is not None and _mebibytes(text) // question.in_one > question.ram:
            yield {"--ram": text}, replace(question, ram=_mebibytes(text) // question.in_one)
    if question.disk is not None:
        text = _needed(replace(fixed, disk=None), Tier.DISK)
        if text is not None and _mebibytes(text) // question.in_one > question.disk:
            yield {"--disk": text}, replace(question, disk=_mebibytes(text) // question.in_one)


def _needed(question: Question, tier: Tier) -> str | None:
    """What a plan takes in ``tier`` of a machine, None where there is none."""
    try:
        return _text(question.plan(_QUICK).peak_nbytes(tier) * question.in_one)
    except (BudgetError, InputError):
        return None


def _smaller_batch(question: Question) -> int | None:
    """The largest smaller batch that fits, None where not even one sample does."""
    low, high = 0, question.batch  # low fits (0 always), high does not
    while high - low > 1:
        # One sample first: where that is too much, nothing else need be tried.
        middle = 1 if low == 0 else (low + high) // 2
        if _fits(replace(question, batch=middle)):
            low = middle
        elif middle == 1:
            return None
        else:
            high = middle
    return low or None


def _fits(question: Question) -> bool:
    return refusal(question) is None


def refusal(question: Question) -> BudgetError | None:
    """Why the step does not fit, None where it does. One planner is asked."""
    try:
        question.plan(_QUICK)
    except BudgetError as error:
        return error.to_keep()
    return None


def _text(nbytes: int) -> str:
    """At least ``nbytes``, as one would write it; `_mebibytes` is its inverse."""
    return f"{-(-nbytes // 2**20)}MiB"


def _mebibytes(text: str) -> int:
    return int(text.removesuffix("MiB")) * 2**20
