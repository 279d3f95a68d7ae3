"""The least changes with which a training step fits that does not."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from tapestream.errors import BudgetError, InputError
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.question import Question
from tapestream.ir.actions import Tier

Change: TypeAlias = dict[str, str]
"""Options and the values that they would have to have."""

_QUICK = "revolve"  # where only the yes or no counts, one planner is enough
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Elsewise:
    """The same step of a model of another kind. ``ask``: the question with other values of ``--dtype`` or ``--seq``,
    which raises InputError where the model has none; ``dtype``, ``sequence``: as asked (None: no tokens)."""

    ask: Callable[[Change], Question]
    dtype: str
    sequence: int | None

    def changes(self) -> Iterator[tuple[Change, Question]]:
        """16 bits, and the first of three shorter lengths that fits."""
        if self.dtype != "bf16":
            with suppress(InputError):
                change = {"--dtype": "bf16"}
                yield change, self.ask(change)
        for shorter in () if self.sequence is None else (self.sequence >> k for k in range(1, 4)):
            with suppress(InputError):
                change = {"--seq": str(shorter)}
                question = self.ask(change)
                if shorter and _fits(question):
                    yield change, question
                    return


def changes_that_fit(question: Question, refusal: BudgetError, elsewise: Elsewise) -> Iterator[tuple[Change, Answer]]:
    """Changes that make ``question`` fit, each tried, the cheapest kind first; several options at once where no one
    does. The first one's plan is that which the command makes once it is made, the others' are any that fit."""
    found = False
    for change, asked in _candidates(question, refusal, elsewise):
        with suppress(BudgetError, InputError):  # some do not go together, as updates in RAM and all on the disk
            yield change, _quickly(asked) if found else asked.plan()
            found = True
    for change, asked in () if found else _several(question):
        with suppress(BudgetError, InputError):
            yield change, asked.plan()
            return


def _quickly(question: Question) -> Answer:
    """A plan, by one planner where that finds one."""
    with suppress(BudgetError):
        return question.plan(_QUICK)
    return question.plan()


def _candidates(question: Question, refusal: BudgetError, elsewise: Elsewise) -> Iterator[tuple[Change, Question]]:
    gpu, least = question.gpu, refusal.least_nbytes
    if question.home is not None:
        yield {"--home": "auto"}, replace(question, home=None)
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
    yield from elsewise.changes()
    yield from _more_room(question)
    if least is not None and least > question.budget:
        yield from _larger_device(question, least)


def _several(question: Question) -> Iterator[tuple[Change, Question]]:
    """As much of the device as the step takes, and of the disk, of RAM, or of both, with the home as it is, then with
    any."""
    for home in dict.fromkeys((question.home, None)):
        for ram, disk in ((question.ram, None), (None, question.disk), (None, None)):
            larger, change = replace(question, ram=ram, disk=disk, home=home), dict[str, str]()
            missing = _refused(larger)
            if missing is not None and missing.least_nbytes is not None:
                change, larger = next(_larger_device(larger, missing.least_nbytes), (change, larger))
            if home != question.home:
                change["--home"] = "auto"
            with suppress(BudgetError, InputError):
                yield _with_rooms(change, larger, question, larger.plan())


def _with_rooms(change: Change, larger: Question, question: Question, found: Answer) -> tuple[Change, Question]:
    """``larger`` with the RAM and disk of ``question``, or with those that ``found`` takes where these are more."""
    rooms: dict[str, int | None] = {}
    for option, tier, room in (("--ram", Tier.HOST, question.ram), ("--disk", Tier.DISK, question.disk)):
        text = _text(found.peak_nbytes(tier) * question.in_one)
        taken = _mebibytes(text) // question.in_one
        rooms[option] = room
        if room is not None and taken > room:
            change, rooms[option] = {**change, option: text}, taken
    return change, replace(larger, ram=rooms["--ram"], disk=rooms["--disk"])


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
            missing = _refused(larger)
            if missing is None:
                yield change, larger
                return
            # The least that was found is rounded; a split of it may take a little more.
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
    return _refused(question, _QUICK)


def _refused(question: Question, planner: str = "auto") -> BudgetError | None:
    try:
        question.plan(planner)
    except BudgetError as error:
        return error.to_keep()
    return None


def _text(nbytes: int) -> str:
    """At least ``nbytes``, as one would write it; `_mebibytes` is its inverse."""
    return f"{-(-nbytes // 2**20)}MiB"


def _mebibytes(text: str) -> int:
    return int(text.removesuffix("MiB")) * 2**20
