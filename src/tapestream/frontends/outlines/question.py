"""`Question`: whether a training step fits a machine, asked of its outline."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tapestream.costs import Budget, Machine, Profile
from tapestream.costs.rates import usual_rates
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.loss import Chunks
from tapestream.frontends.module.plans.divide import Division
from tapestream.frontends.module.plans.shared import find_shared
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.group_costs import kept_nbytes
from tapestream.frontends.outlines.outline import Outline
from tapestream.ir.actions import Kind, Tier
from tapestream.ir.homes import KINDS, HomeTiers, home_tiers
from tapestream.optim.parts import passed_nbytes
from tapestream.passes.memory import block_values
from tapestream.planning.where import Where
from tapestream.units import format_nbytes

_BY_ROWS = ("sgd", "adagrad")
_PLACES = {Tier.HOST: ("RAM", "Budget(host=)"), Tier.DISK: ("disk", "Budget(disk=)")}


@dataclass(frozen=True, slots=True)
class Variant:
    """A step of ``batch`` samples. ``moves``: whether blocks may leave the device; ``loss_chunks``: in how many the
    loss is computed (None: one); ``lora``: rank of the adapters that are trained in place of weights (None: none);
    ``tables``: names of embeddings that stay off the device."""

    batch: int
    moves: bool = True
    loss_chunks: Chunks | None = None
    lora: int | None = None
    tables: tuple[str, ...] = ()


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
