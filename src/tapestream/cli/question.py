"""Whether a training step fits a machine, and if not, the least change with which it does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from tapestream.cli.answer import Answer
from tapestream.cli.costs import Variant
from tapestream.costs import Budget, Machine, Profile
from tapestream.costs.rates import usual_rates
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.loss import Chunks
from tapestream.frontends.module.plans.divide import Division
from tapestream.frontends.module.plans.shared import find_shared
from tapestream.ir.actions import Kind, Tier
from tapestream.ir.homes import KINDS, HomeTiers, home_tiers
from tapestream.models.group_costs import kept_nbytes
from tapestream.models.outline import Outline
from tapestream.optim.parts import passed_nbytes
from tapestream.passes.memory import block_values
from tapestream.planning.where import Where
from tapestream.units import format_nbytes

Change: TypeAlias = dict[str, str]
"""Options and the values that they would have to have."""

_QUICK = "revolve"  # where only the yes or no counts, one planner is enough
_TRIES = 4
_BY_ROWS = ("sgd", "adagrad")
_PLACES = {Tier.HOST: ("RAM", "--ram"), Tier.DISK: ("disk", "--disk")}


@dataclass(frozen=True, slots=True)
class Question:
    """A model, how it is trained, and the machine. Sizes in bytes (None: as much as it takes). ``speeds``:
    of links, and of computing where they are known.

    ``outline``: of a step. ``lora``, ``loss_chunks``, ``tables``: see `Variant`.
    ``budget``: allowed on the device; ``gpu``: what the device has. ``home``: None chooses RAM where what does not stay
    on the device fits into it, the disk otherwise. ``shards``: ranks among which blocks are divided; all sizes are of
    one of them. ``in_one``: how many have a machine's RAM and disk together. ``where``: blocks are updated.
    """

    outline: Callable[[Variant], Outline]
    batch: int
    optimizer: str
    update: str
    device: str
    budget: int
    gpu: int | None
    ram: int | None
    disk: int | None
    home: Tier | None
    speeds: Machine
    loss_chunks: Chunks | None = None
    lora: int | None = None
    tables: tuple[str, ...] = ()
    shards: int = 1
    in_one: int = 1
    where: Where = "device"

    def outlined(self) -> Outline:
        """The step, whatever it is trained with."""
        moves = self.home is not Tier.DEVICE
        return self.outline(Variant(self.batch, moves, self.loss_chunks, self.lora, self.tables))

    @property
    def tables_nbytes(self) -> dict[Tier, int]:
        """Bytes of tables where they lie: in RAM below a GPU, with what an optimizer keeps for them, or on the disk."""
        nbytes = sum(p.nbytes for p in self.outlined().tables)
        return {Tier.DISK: nbytes} if self.device == "cpu" else {Tier.HOST: nbytes + self._kept_for_tables}

    @property
    def _kept_for_tables(self) -> int:
        return sum(kept_nbytes(p, self.optimizer) for p in self.outlined().tables)

    @property
    def tables_to_try(self) -> list[str]:
        """Names of embeddings that might be looked up: frozen ones, and others with an optimizer that steps rows."""
        return [name for name, trained in self.outlined().look_up.items() if not trained or self.optimizer in _BY_ROWS]

    @property
    def in_chunks(self) -> "Question | None":
        """The same with the loss in chunks, None where it is, or where there is no linear head to make it so."""
        chunked = replace(self, loss_chunks="auto")
        if self.loss_chunks is not None:
            return None
        try:
            chunked.outlined()
        except InputError:
            return None
        return chunked

    def profiles(self, *, finer: bool = False) -> tuple[Profile, ...]:
        """What the step costs, segment by segment; ``finer``: with optimizer state in the smallest parts."""
        found = self._profiles(None, finer)
        if self.device == "cpu" or not self.homes.use(Tier.DISK):
            return found
        passed = self.ram
        if self.homes.overflowing:
            passed = passed_nbytes(self.home_nbytes(found), self.budget, self.ram)
        return found if passed is None else self._profiles(passed, finer)

    def _profiles(self, passed_nbytes: int | None, finer: bool) -> tuple[Profile, ...]:
        return self.outlined().profiles(
            rates=self.speeds.rates(usual_rates(self.device)),
            optimizer=self.optimizer,
            update=self.update,  # type: ignore[arg-type]  # planning checks it
            budget_nbytes=self.budget,
            passed_nbytes=passed_nbytes,
            finer=finer,
            beside_nbytes=self._kept_for_tables if self.device == "cpu" else 0,
            home=Tier.HOST if self.home is None else self.home,
            shards=self.shards,
            where=self.where,
        )

    def machine(self) -> Machine:
        """Tiers and links: the disk is reached through RAM."""
        return self.speeds

    @property
    def homes(self) -> HomeTiers:
        """Where blocks may live that do not stay on the device: where it was asked for, else in RAM, and on the disk
        what finds no room there."""
        if self.home is not None:
            return home_tiers(self.home)
        return home_tiers(Tier.DISK) if self.device == "cpu" else home_tiers(Tier.HOST, overflowing=KINDS)

    def home_nbytes(self, profiles: tuple[Profile, ...]) -> int:
        """Bytes of everything that could live at home: parameters, optimizer state, and gradients kept for the step."""
        values = ((value, nbytes) for profile in profiles for value, nbytes in block_values(profile))
        return sum(nbytes for value, nbytes in values if value.kind is not Kind.GRADIENT or self.update == "step")

    def plan(self, planner: str = "auto") -> Answer:
        """The plans. Raises BudgetError where nothing fits."""
        if self.gpu is not None and self.budget > self.gpu:
            raise BudgetError(
                f"a budget of {format_nbytes(self.budget)} was asked for on a device of {format_nbytes(self.gpu)}; "
                f"allow {format_nbytes(self.gpu)} at most"
            )
        beside = self._beside_tables()
        profiles = beside.profiles()
        try:
            return beside._planned(profiles, planner)
        except BudgetError:
            finer = beside.profiles(finer=True)
            if finer == profiles:
                raise
        return beside._planned(finer, planner)

    def _beside_tables(self) -> "Question":
        """The same with the room that tables leave. Raises BudgetError where there is none."""
        left = {Tier.HOST: self.ram, Tier.DISK: self.disk}
        for tier, nbytes in self.tables_nbytes.items():
            room = left[tier]
            if room is not None and room < nbytes:
                raise BudgetError(
                    f"the tables and what their optimizer keeps take {format_nbytes(nbytes)} of {_PLACES[tier][0]}, "
                    f"which has {format_nbytes(room)}; give more there ({_PLACES[tier][1]})"
                )
            left[tier] = None if room is None else room - nbytes
        return replace(self, ram=left[Tier.HOST], disk=left[Tier.DISK])

    def _planned(self, profiles: tuple[Profile, ...], planner: str) -> Answer:
        self._check_room(self.home_nbytes(profiles))

        outline = self.outlined()
        terms = replace(
            outline.terms(self.update),  # type: ignore[arg-type]
            budget=Budget(host=self.ram, disk=self.disk), machine=self.machine, home=self.homes,
            planner=planner, where=self.where,
        )  # fmt: skip
        outside, shared = profiles[0].outside_nbytes, find_shared(outline.segments, outline.uses)
        division = Division(terms, outline.segments, profiles, self.budget, outside, shared)
        answer = Answer(division, tuple(division.plans()), self.tables_nbytes)
        for tier, room in ((Tier.HOST, self.ram), (Tier.DISK, self.disk)):
            taken = answer.peak_nbytes(tier) - answer.tables.get(tier, 0)
            if room is not None and taken > room:  # each part by itself fits
                raise BudgetError(
                    f"the {len(profiles)} parts of a step together take {format_nbytes(taken)} of "
                    f"{_PLACES[tier][0]}, which has {format_nbytes(room)}; give more there ({_PLACES[tier][1]})"
                )
        return answer

    def _check_room(self, lives: int) -> None:
        """Raise BudgetError where so many bytes find no room: the planners would find out too, but slowly."""
        tiers = [tier for tier in _PLACES if self.homes.use(tier)]
        rooms = [{Tier.HOST: self.ram, Tier.DISK: self.disk}[tier] for tier in tiers]
        room = sum(room for room in rooms if room is not None) + self.budget
        if not tiers or None in rooms or lives <= room:
            return
        places = ", ".join(_PLACES[tier][0] for tier in tiers)
        options = " or ".join(_PLACES[tier][1] for tier in tiers)
        raise BudgetError(
            f"parameters and optimizer state take {format_nbytes(lives * self.in_one)}, "
            f"{'the device' if self.in_one == 1 else f'{self.in_one} GPUs'} and {places} have "
            f"{format_nbytes(room * self.in_one)}; give more there ({options})"
        )


def changes_that_fit(question: Question, refusal: BudgetError) -> Iterator[tuple[Change, Answer]]:
    """Changes that make ``question`` fit, each tried, the cheapest kind first, each with a plan (not the fastest).
    Where no single one does: a larger device together with what is missing below it."""
    found = False
    for change, answer in _tried(_candidates(question, refusal)):
        found = True
        yield change, answer
    if not found:
        yield from islice(_tried(_device_and_room(question)), 1)


def _tried(candidates: Iterator[tuple[Change, Question]]) -> Iterator[tuple[Change, Answer]]:
    for change, asked in candidates:
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
            change, larger = _with_device(replace(question, update=update), nbytes)
            if update != question.update:
                change["--update"] = update
            missing = refusal(larger)
            if missing is None:
                yield change, larger
                return
            # The least that was found is another planner's, and rounded; a split of it may take a little more.
            nbytes = max(missing.least_nbytes or 0, nbytes * 105 // 100)


def _with_device(question: Question, nbytes: int) -> tuple[Change, Question]:
    """The same with a budget of so many bytes, and a device of as many where it has less."""
    text = _text(nbytes)
    change, larger = {"--budget": text}, replace(question, budget=_mebibytes(text))
    if question.gpu is None or larger.budget <= question.gpu:
        return change, larger
    return {**change, _device_option(question): text}, replace(larger, gpu=larger.budget)


def _device_and_room(question: Question) -> Iterator[tuple[Change, Question]]:
    """A larger device, and what is missing in RAM or on the disk beside it."""
    missing = refusal(replace(question, ram=None, disk=None))
    if missing is None or missing.least_nbytes is None:
        return
    for number in range(_TRIES):
        change, larger = _with_device(question, missing.least_nbytes * (100 + 5 * number) // 100)
        for more, asked in _more_room(larger):
            yield {**change, **more}, asked


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
