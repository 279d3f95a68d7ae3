"""What planners of several tiers share: the way to a slower tier and back, bytes of equal stages, what fits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Free, Keep, Kind, Node, Offload, Prefetch, Restore, Tier, Value, Wait
from tapestream.planners._equal import equal_stages, usual
from tapestream.planners._fit import finite, positive
from tapestream.units import format_nbytes

DEVICE = Tier.DEVICE
Candidate = TypeVar("Candidate")


def tier_of(name: str, tier: object) -> Tier:
    """HOST or DISK, given as a `Tier` or by its name."""
    if isinstance(tier, str) and tier.upper() in ("HOST", "DISK"):
        return Tier[tier.upper()]
    if not isinstance(tier, Tier) or tier is DEVICE:
        raise InputError(f"{name}: a slower tier is 'host' or 'disk', not {tier!r}")
    return tier


def fastest_below(machine: Machine | None) -> Tier:
    """The tier below the device that ``machine`` links to it; HOST when nothing is known."""
    linked = machine is not None and (DEVICE, Tier.HOST) not in machine.links and (DEVICE, Tier.DISK) in machine.links
    return Tier.DISK if linked else Tier.HOST


@dataclass(frozen=True, slots=True)
class Store:
    """A slower tier for states: the tiers on the way (DEVICE first), seconds of one state there and back, waited for,
    and those of them in which compute stands still even where nobody waits. Without a machine copies take no time, as
    for the judge."""

    route: tuple[Tier, ...]
    write_seconds: float
    read_seconds: float
    busy_writing_seconds: float = 0.0
    busy_reading_seconds: float = 0.0

    @classmethod
    def of(cls, name: str, tier: Tier, state_nbytes: int, machine: Machine | None) -> "Store":
        """``tier`` of ``machine``; InputError when it has no link on the way."""
        if machine is None:
            return cls((DEVICE, tier), 0.0, 0.0)
        route = machine.route(tier)[::-1]
        write = sum(machine.link(a, b).seconds(state_nbytes) for a, b in pairwise(route))
        read = sum(machine.link(b, a).seconds(state_nbytes) for a, b in pairwise(route))
        finite(name, f"writing to {tier.name}", write)
        finite(name, f"reading {tier.name}", read)
        out = sum(machine.link(a, b).busy_seconds for a, b in pairwise(route))
        back = sum(machine.link(b, a).busy_seconds for a, b in pairwise(route))
        return cls(route, write, read, out, back)

    @property
    def tier(self) -> Tier:
        """Where states end up."""
        return self.route[-1]

    def write(self, stage: int) -> tuple[Node, ...]:
        """Live state ``stage`` is copied to the tier; it stays live."""
        state = Value(Kind.STATE, stage)
        out: list[Node] = [Keep(stage)]
        for source, target in pairwise(self.route):
            out += (Offload(state, source, target), Wait(state, target), Free(state, source))
        return tuple(out)

    def read(self, stage: int, last: bool) -> tuple[Node, ...]:
        """State ``stage`` becomes live; ``last``: the tier's copy is dropped."""
        state = Value(Kind.STATE, stage)
        out: list[Node] = []
        for target, source in reversed(list(pairwise(self.route))):
            out += (Prefetch(state, source, target), Wait(state, target))
            if source is not self.tier or last:
                out.append(Free(state, source))
        return (*out, Restore(stage), Free(state, DEVICE))


def device_nbytes(profile: Profile, states: int, records: int = 1) -> int:
    """Bytes of the device with ``states`` kept and ``records`` recorded stages, never less than the judge finds.

    Besides: the state before and after the stage that runs, two cotangents, whatever is transient. A record of several
    stages keeps the states between them where backward reads these.
    """
    cost = usual(profile)
    between = (records - 1) * (cost.reads_input or cost.reads_output)
    transient = max(cost.forward_extra_nbytes, cost.recorded_extra_nbytes, cost.backward_extra_nbytes)
    return (
        profile.outside_nbytes
        + (states + between + 2) * cost.output_nbytes
        + records * cost.saved_nbytes
        + 2 * cost.cotangent_bytes
        + max(transient, profile.turn_nbytes)
        + len(profile) * cost.gradient_nbytes
    )


def most_slots(profile: Profile, budget: Budget, spare: int = 0) -> int:
    """The most restart checkpoints, besides ``spare`` buffers of a state, that the device budget holds; at least 1."""
    n, limit, size = len(profile), budget.device_nbytes, usual(profile).output_nbytes
    free = n if limit is None or not size else (limit - device_nbytes(profile, spare)) // size
    return max(1, min(n, free))


@dataclass(frozen=True, slots=True)
class Two:
    """The device with ``slots`` restart checkpoints (and ``spare`` buffers of a state) above one slower tier."""

    name: str
    profile: Profile
    budget: Budget
    slots: int
    store: Store
    spare: int

    @classmethod
    def of(
        cls, name: str, profile: Profile, budget: Budget, machine: Machine | None,
        slots: int | None, tier: Tier | str | None, spare: int = 0,
    ) -> "Two":  # fmt: skip
        """``slots`` left out: the most within the budget; ``tier`` left out: the fastest linked to the device."""
        n, cost = len(profile), equal_stages(name, profile)
        below = fastest_below(machine) if tier is None else tier_of(name, tier)
        store = Store.of(name, below, cost.output_nbytes, machine)
        if slots is None:
            slots = most_slots(profile, budget, spare)
        return cls(name, profile, budget, positive(name, "slots", slots, n), store, spare)

    def direct(self) -> Store:
        """The slower tier; InputError where another one lies on the way."""
        if len(self.store.route) > 2:
            between = self.store.route[1].name
            raise InputError(
                f"{self.name}: {self.store.tier.name} is reached by way of {between}, and only copies on a direct link "
                f"overlap with computation; use tier={between.lower()!r} or planner 'h_revolve'"
            )
        return self.store

    def nbytes(self, states: int) -> dict[Tier, int]:
        """Bytes of every tier with ``states`` states in the slower one."""
        size = usual(self.profile).output_nbytes
        between = dict.fromkeys(self.store.route[1:-1], size if states else 0)
        device = device_nbytes(self.profile, self.slots + self.spare)
        return {DEVICE: device, **between, self.store.tier: states * size}

    def check(self, states: int) -> None:
        """Raises BudgetError unless ``states`` states in the slower tier fit, and the slots on the device."""
        first_within(self.name, [(None, self.nbytes(states))], self.budget)


def first_within(name: str, candidates: Iterable[tuple[Candidate, Mapping[Tier, int]]], budget: Budget) -> Candidate:
    """The first of ``candidates`` (fastest first, each with the bytes that it takes in each tier) within ``budget``.

    Raises BudgetError: ``least_nbytes`` are the least device bytes of those that fit the slower tiers, None where it is
    one of these that is too small.
    """
    least: int | None = None
    too_large: tuple[int, Tier] | None = None
    for candidate, nbytes in candidates:
        over = [tier for tier in nbytes if (allowed := budget.nbytes(tier)) is not None and nbytes[tier] > allowed]
        if not over:
            return candidate
        if over == [DEVICE]:
            least = nbytes[DEVICE] if least is None else min(least, nbytes[DEVICE])
        else:
            tier = over[-1]
            too_large = min(too_large or (nbytes[tier], tier), (nbytes[tier], tier))
    tier, found = (DEVICE, least) if least is not None else (too_large or (0, DEVICE))[::-1]
    limit = budget.nbytes(tier) or 0
    raise BudgetError(
        f"{name}: a {tier.name} budget of {format_nbytes(limit)} ({limit} bytes) was asked for, but the leanest "
        f"schedule found needs {format_nbytes(found)} ({found} bytes) there; give at least {found} bytes, or use "
        "planner 'rotor', which chooses by bytes",
        least_nbytes=least,
    )
