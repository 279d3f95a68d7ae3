"""`Outline`: what one training step of a model takes, whatever optimizer and machine, as profiles for planners."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from torch import nn

from tapestream.costs import Budget, Carried, Machine, Profile, StageCost
from tapestream.costs.rates import Rates, Work
from tapestream.frontends.module.plans.shared import find_shared
from tapestream.frontends.module.plans.step import Step
from tapestream.frontends.module.plans.terms import Terms, Update
from tapestream.frontends.outlines.group_costs import block_costs, kept_nbytes, staying_nbytes
from tapestream.ir.actions import Tier
from tapestream.ir.homes import HomeLike
from tapestream.planning.stage_costs import with_behind
from tapestream.planning.where import Where

Works: TypeAlias = tuple[Work, Work]
"""Operations of a forward and of its backward."""


class Outlined(NamedTuple):
    """What a module's call takes: its cost, without seconds, its operations, and bytes behind the cotangents that its
    backward gives (see `with_behind`)."""

    cost: StageCost
    works: Works
    behind_nbytes: int


@dataclass(slots=True)
class Segment:
    """Modules called one after the other. ``stages``: their costs, without seconds; ``works``: their operations;
    ``behind``: bytes behind the cotangents that they give; ``positions``: which they are; ``spans``: first and last
    state of each storage that several share, and its bytes."""

    initial_nbytes: int
    stages: list[StageCost] = field(default_factory=list)
    works: list[Works] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    travelling: dict[int, int] = field(default_factory=dict)  # storages of the last state: where in ``spans``

    def follow(self, before: dict[int, int], after: dict[int, int]) -> None:
        """After a stage was added: which storages of its input its output holds too. Both: storage to bytes."""
        k = len(self.stages)
        was, self.travelling = self.travelling, {}
        for key, nbytes in after.items():
            if key not in before:
                self.travelling[key] = len(self.spans)
                self.spans.append((k, k, nbytes))
            elif key in was:  # what was there before the first block costs nothing: it is in ``initial_nbytes``
                first, _, nbytes = self.spans[was[key]]
                self.spans[was[key]] = (first, k, nbytes)
                self.travelling[key] = was[key]

    @property
    def carried(self) -> tuple[Carried, ...]:
        """Storages that several states share."""
        return tuple(Carried(first, last, nbytes) for first, last, nbytes in self.spans if last > first)


@dataclass(frozen=True, slots=True)
class Outline:
    """What a model takes for one kind of batch, whatever the optimizer and the machine.

    ``modules``: blocks and, from position ``wide`` on, embeddings, heads and others that come and go like them;
    ``uses``: the group of each; ``groups``: parameters that move together; ``outside``: parameters that do not.
    ``before_nbytes``: tape and constants of what runs before and between blocks; ``turn_nbytes``: of what runs after
    them; ``turn_work``: operations of both, forward and backward. ``tables``: parameters that stay off the device;
    ``look_up``: names of embeddings that might, of a quarter of a block and 1 MiB at least, and whether they are
    trained.
    """

    segments: tuple[Segment, ...]
    modules: tuple[nn.Module, ...]
    wide: int
    uses: tuple[int | None, ...]
    groups: tuple[tuple[nn.Parameter, ...], ...]
    outside: tuple[nn.Parameter, ...]
    buffers_nbytes: int
    before_nbytes: int
    turn_nbytes: int
    turn_work: Work
    tables: tuple[nn.Parameter, ...] = ()
    look_up: Mapping[str, bool] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Numbers that the model holds, shared ones once."""
        return sum(p.numel() for p in (*(p for group in self.groups for p in group), *self.outside, *self.tables))

    @property
    def trains(self) -> bool:
        """Whether any parameter takes a gradient."""
        held = (*(p for group in self.groups for p in group), *self.outside, *self.tables)
        return any(p.requires_grad for p in held)

    @property
    def flops(self) -> int:
        """Floating-point operations of one step with everything stored."""
        works = (work for segment in self.segments for works in segment.works for work in works)
        return sum(count * flops for work in (*works, self.turn_work) for (flops, _), count in work.items())

    def terms(self, update: Update) -> Terms:
        """On what terms to plan where nothing is known of a machine."""
        return Terms(self.modules, self.wide, Budget(), Machine, Tier.DEVICE, update)

    def profiles(
        self,
        *,
        rates: Rates,
        optimizer: str = "adamw",
        update: Update = "step",
        budget_nbytes: int | None = None,
        passed_nbytes: int | None = None,
        finer: bool = False,
        beside_nbytes: int = 0,
        home: HomeLike = Tier.HOST,
        shards: int = 1,
        where: Where = "device",
    ) -> tuple[Profile, ...]:
        """One Profile for each segment, as `tapestream.stream` would find them, with all that lies outside; gradients
        of what runs before the blocks count throughout. An update reads and writes memory as fast as that is.

        ``budget_nbytes``: of the device, for which optimizer state is cut into parts (``finer``: as where a plan needs
        it); None leaves that of a block in one. ``passed_nbytes``: of the host, where state passes it on its way to a
        disk. ``beside_nbytes``: what else is on the device throughout. ``home``: where gradients go. ``shards``: ranks
        among which blocks are divided. ``where``: blocks are updated; state that stays in RAM is in one part.
        Raises InputError for an unknown optimizer.
        """
        costs = block_costs(
            self.groups, optimizer, rates.memory_bytes_per_second,
            budget_nbytes=None if where == "host" else budget_nbytes,
            passed_nbytes=passed_nbytes, finer=finer, moves=home is not Tier.DEVICE, shards=shards,
            host_updates_per_second=None if where == "device" else rates.host_updates_per_second,
        )  # fmt: skip
        outside = self.buffers_nbytes + self.before_nbytes + beside_nbytes
        outside += sum(p.nbytes * (2 if p.requires_grad else 1) + kept_nbytes(p, optimizer) for p in self.outside)
        outside += sum(staying_nbytes(p, optimizer) for held in (*self.groups, self.outside) for p in held)
        step = Step(
            replace(self.terms(update), home=home), self.segments, self.uses, costs,
            find_shared(self.segments, self.uses), outside, self.turn_nbytes, rates.seconds(self.turn_work),
            shards,
        )  # fmt: skip
        return tuple(
            step.profile(
                number,
                with_behind(list(_timed(segment, rates)), segment.behind),
                segment.initial_nbytes,
                segment.carried,
            )
            for number, segment in enumerate(self.segments)
        )


def _timed(segment: Segment, rates: Rates) -> Iterator[StageCost]:
    shared = {first: 0 for first, _, _ in segment.spans}
    for carried in segment.carried:
        shared[carried.first] += carried.nbytes
    different = {id(works): works for works in segment.works}
    known = {key: tuple(map(rates.seconds, works)) for key, works in different.items()}
    made: dict[tuple[int, int, int], StageCost] = {}  # equal stages are outlined once, and timed once
    for k, (cost, works) in enumerate(zip(segment.stages, segment.works, strict=True)):
        kind = id(cost), id(works), shared.get(k + 1, 0)
        if kind not in made:
            forward, backward = known[id(works)]
            nbytes = cost.output_nbytes - kind[-1]
            made[kind] = replace(cost, forward_seconds=forward, backward_seconds=backward, output_nbytes=nbytes)
        yield made[kind]
