"""`Answer`: the plans of one training step, one for each segment, and what they take together."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tapestream.costs import Machine
from tapestream.frontends.module.plans.divide import Division
from tapestream.ir.actions import Tier
from tapestream.planning.bound import before_updates, updates_on_host
from tapestream.planning.plan import Plan
from tapestream.units import format_nbytes


@dataclass(frozen=True, slots=True)
class Answer:
    """Plans of chains of blocks and of modules beside them, each within its part of the device (``division``).
    ``tables``: bytes in tiers below it of tables whose rows are looked up there."""

    division: Division
    plans: tuple[Plan, ...]
    tables: Mapping[Tier, int] = field(default_factory=dict)

    @property
    def chains(self) -> tuple[Plan, ...]:
        """Those for repeated blocks; for a model in which none was called, all."""
        terms, pairs = self.division.terms, zip(self.division.segments, self.plans, strict=True)
        return tuple(plan for segment, plan in pairs if not terms.is_wide(segment)) or self.plans

    def allowed_nbytes(self, tier: Tier) -> int | None:
        """Most bytes that may be held in ``tier``, None for no limit."""
        if tier is Tier.DEVICE:
            return self.division.allowed
        left = self.division.terms.budget.nbytes(tier)
        return None if left is None else left + self.tables.get(tier, 0)

    @property
    def seconds(self) -> float:
        """Of one step."""
        return sum(plan.seconds for plan in self.plans)

    @property
    def fastest_seconds(self) -> float:
        """Of one step by the fastest plans found; those chosen are at most 3% slower, and run or move less."""
        return sum(plan.seconds if plan.fastest_seconds is None else plan.fastest_seconds for plan in self.plans)

    @property
    def waiting_seconds(self) -> float:
        """Of these, seconds in which computation waits for copies."""
        return sum(plan.simulation.stall_seconds for plan in self.plans)

    @property
    def overhead(self) -> float:
        """Seconds over those with everything stored."""
        stored = sum(plan.stored_seconds for plan in self.plans)
        return self.seconds / stored if stored else 1.0

    @property
    def forwards(self) -> int:
        """Evaluations of blocks in one step, recorded ones included."""
        return sum(plan.simulation.forwards for plan in self.chains)

    @property
    def moved_nbytes(self) -> int:
        """Bytes that cross links in one step."""
        return sum(sum(plan.simulation.bytes_moved.values()) for plan in self.plans)

    def bounds(self, machine: Machine) -> dict[tuple[Tier, Tier] | None, float]:
        """Seconds that one step takes at least with this traffic: of computation (None), and of all copies from one
        tier to another (SHARD to DEVICE: all that goes on between ranks); what is written to the disk waits for the
        first update. (HOST, HOST): of updates in RAM, and of what cannot go on beside them."""
        moved = Counter[tuple[Tier, Tier]]()
        for plan in self.plans:
            moved.update(plan.simulation.bytes_moved)
        copies = {ends: nbytes / machine.link(*ends).bytes_per_second for ends, nbytes in moved.items() if nbytes}
        sums = copies.pop((Tier.DEVICE, Tier.SHARD), 0.0)
        if sums:  # on one lane with gathers
            copies[Tier.SHARD, Tier.DEVICE] = copies.get((Tier.SHARD, Tier.DEVICE), 0.0) + sums
        for ends in copies:
            if ends[1] is Tier.DISK:
                writing = [plan for plan in self.plans if plan.simulation.bytes_moved.get(ends)]
                copies[ends] += min(before_updates(plan.schedule, plan.profile) for plan in writing)
        found: dict[tuple[Tier, Tier] | None, float] = {None: self.seconds - self.waiting_seconds}
        hosted = (plan for plan in self.plans if Tier.HOST in plan.simulation.updated)
        updates = sum(updates_on_host(plan.schedule, plan.profile) for plan in hosted)
        return found | copies | ({(Tier.HOST, Tier.HOST): updates} if updates else {})

    @property
    def planner(self) -> str:
        """Who made the plans of the chains."""
        return ", ".join(dict.fromkeys(plan.planner for plan in self.chains))

    @property
    def written_nbytes(self) -> int:
        """Bytes written to the disk in one step."""
        moved = (item for plan in self.plans for item in plan.simulation.bytes_moved.items())
        return sum(nbytes for (_, target), nbytes in moved if target is Tier.DISK)

    def peak_nbytes(self, tier: Tier) -> int:
        """Most bytes held in ``tier``."""
        if tier is Tier.DEVICE:
            return self.division.peak_nbytes(self.plans)
        return self.tables.get(tier, 0) + sum(plan.simulation.peak_nbytes[tier] for plan in self.plans)

    @property
    def fills(self) -> dict[str, int]:
        """What the device holds when it is fullest: names for people, and bytes. Empty where a plan does not know."""
        nbytes, plans = self.division.fullest(self.plans)
        each = [plan.fills for plan in plans]
        if not all(each):
            return {}
        found = Counter[str]()
        for fills in each:
            found.update(fills)
        found["outside the blocks"] -= sum(plan.profile.outside_nbytes for plan in plans[1:])
        found["blocks that wait"] += nbytes - found.total()
        return dict((+found).most_common())

    def __str__(self) -> str:
        terms = self.division.terms
        beside = [terms.modules[k] for segment in self.division.segments for k in segment.positions if k >= terms.wide]
        lines = [str(plan) for plan in self.chains]
        if beside:
            held = {id(p): p.nbytes for module in beside for p in module.parameters()}
            names = " and ".join(dict.fromkeys(type(module).__name__ for module in beside))
            lines.append(f"beside the blocks: {names} of {format_nbytes(sum(held.values()))}, planned like them")
        return "\n".join(lines)
