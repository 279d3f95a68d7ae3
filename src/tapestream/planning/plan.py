"""`Plan`: a schedule that the judge has accepted, with what it costs and what else was considered."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from tapestream.costs import Budget, Machine, Profile, UniformStages
from tapestream.errors import Allowance
from tapestream.ir import MEMORIES, KeepInside, PhaseKind, Schedule, Tier, Update, distinct_nodes
from tapestream.planning import picture, plan_file
from tapestream.planning.pace import Pace
from tapestream.planning.remedy import Remedy
from tapestream.planning.whole_step import WholeStep
from tapestream.simulate import Simulation, simulate
from tapestream.simulate.filling import filling
from tapestream.units import format_nbytes, format_seconds

Alternative: TypeAlias = tuple[str, float | None, str]
"""A candidate's name, its makespan in seconds (None: it does not apply or fit), and what it does or why not."""


_LONGEST_LOOK = 200_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done in one training step, judged. ``print(plan)`` shows it.

    ``planner``: who made the schedule. ``alternatives``: what every candidate would cost, the chosen one included.
    ``fastest_seconds``: of the fastest plan found, at most 3% faster, with more runs or more traffic (None: not known).
    ``paces``: how fast calls of this size are, and the longest, if `stream` or `plan` was told it; ``remedies``: what
    would make such a step faster, if `plan` was asked for it. ``step``: the whole step, with other chains and what is
    beside them, where `plan` planned by shapes alone (None elsewhere). No file has them.
    """

    schedule: Schedule
    profile: Profile
    simulation: Simulation
    budget: Budget
    machine: Machine | None
    planner: str
    alternatives: tuple[Alternative, ...] = ()
    paces: tuple[Pace, ...] = ()
    remedies: tuple[Remedy, ...] = field(default=(), compare=False)
    fastest_seconds: float | None = field(default=None, compare=False)
    offers: Callable[[], tuple[Allowance, ...]] | None = field(default=None, compare=False, repr=False)
    step: WholeStep | None = None

    @property
    def budgets(self) -> tuple[Allowance, ...]:
        """Budgets of the device that work for such a step, the smallest first: what a `BudgetError` offers. Takes as
        long as a few plans. Empty for a loop's plan, and for one that was made by hand or read from a file."""
        return () if self.offers is None else self.offers()

    @classmethod
    def judged(
        cls,
        schedule: Schedule,
        profile: Profile,
        budget: Budget,
        machine: Machine | None,
        alternatives: tuple[Alternative, ...] = (),
    ) -> "Plan":
        """A plan from a schedule. Raises ScheduleError if it breaks a rule, BudgetError if it does not fit."""
        simulation = simulate(schedule, profile, machine, budget)
        return cls(schedule, profile, simulation, budget, machine, schedule.planner, alternatives)

    @property
    def seconds(self) -> float:
        """The makespan in seconds."""
        return self.simulation.makespan_seconds

    @property
    def peak_nbytes(self) -> int:
        """Most bytes held on the device at any time."""
        return self.simulation.peak_nbytes[Tier.DEVICE]

    @property
    def fills(self) -> dict[str, int]:
        """What the device holds at the peak: names for people, and bytes that add up to it. Empty for a schedule of
        more than 200,000 actions."""
        if self.schedule.size > _LONGEST_LOOK:
            return {}
        return dict(filling(self.schedule, self.profile, self.machine, self.simulation).most_common())

    @property
    def overhead(self) -> float:
        """Makespan relative to the same step with everything stored and resident (1.0: nothing is lost)."""
        stored = self.stored_seconds
        return self.seconds / stored if stored else 1.0

    @property
    def stored_seconds(self) -> float:
        """Seconds of one step with everything stored on the device."""
        profile, backward = self.profile, PhaseKind.BACKWARD in self.simulation.phase_seconds
        uniform = isinstance(profile.stages, UniformStages)
        stages = (profile.stages.cost,) if isinstance(profile.stages, UniformStages) else profile.stages
        seconds = sum(s.recorded_seconds + s.backward_seconds if backward else s.forward_seconds for s in stages)
        seconds *= len(profile) if uniform else 1
        updated = frozenset[int]().union(*self.simulation.updated.values())
        turn = profile.turn_seconds if backward else 0.0
        return seconds + turn + sum(profile.blocks[block].update_seconds for block in updated)

    def __repr__(self) -> str:
        return (  # print() shows all of it
            f"<Plan by {self.planner or 'hand'} for {self.profile.runs} stages: {format_seconds(self.seconds)}, "
            f"{format_nbytes(self.peak_nbytes)}>"
        )

    def __str__(self) -> str:
        found, n = self.simulation, self.profile.runs
        rows = [
            ("time", f"{format_seconds(self.seconds)}, overhead {self.overhead:.2f}" + self._waiting()),
            *([] if self.step is None else [("whole step", str(self.step))]),
            *(("speed", str(pace)) for pace in self.paces),
            ("forwards", f"{found.forwards} for {n} stages ({found.forwards / n:.2f} each)"),
            *(
                (self.tier_name(tier), self._memory(tier))
                for tier in MEMORIES
                if tier is Tier.DEVICE or self._matters(tier)
            ),
            ("moved", self._moved()),
            *self._updates(),
            *self._kept(),
            *(("would help", str(remedy)) for remedy in self.remedies),
            ("chosen", self._why()),
        ]
        rows += [(f"  {name}", _outcome(seconds, reason)) for name, seconds, reason in self.alternatives]
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            (f"plan for {n} stages by {self.planner or 'hand'}", *(f"  {a:<{width}}  {b}" for a, b in rows))
        )

    def tier_name(self, tier: Tier) -> str:
        """The tier's name for people: on a machine without a host below its device, the device is RAM."""
        links = self.machine.links if self.machine else {}
        if tier is Tier.SHARD:
            return "other ranks"
        on_cpu = (Tier.DISK, Tier.DEVICE) in links and (Tier.HOST, Tier.DEVICE) not in links
        return "RAM" if tier is Tier.DEVICE and on_cpu else tier.name

    def _matters(self, tier: Tier) -> bool:
        return self.simulation.peak_nbytes[tier] > 0

    def _waiting(self) -> str:
        stall = self.simulation.stall_seconds
        return f", {format_seconds(stall)} of it waiting for copies" if stall > 0 else ""

    def _memory(self, tier: Tier) -> str:
        peak, allowed = self.simulation.peak_nbytes[tier], self.budget.nbytes(tier)
        limit = (
            "no limit" if allowed is None else f"{format_nbytes(allowed)} allowed ({peak / max(1, allowed):.0%} used)"
        )
        return f"{format_nbytes(peak)} at the peak, {limit}"

    def _moved(self) -> str:
        moved = self.simulation.bytes_moved.items()
        lanes = (
            f"{format_nbytes(nbytes)} {self.tier_name(source)} to {self.tier_name(target)}"
            for (source, target), nbytes in moved
            if nbytes
        )
        return ", ".join(lanes) or "nothing"

    def _updates(self) -> Iterator[tuple[str, str]]:
        """Those in HOST, where there are any, and whose bits they have."""
        if blocks := self.simulation.updated.get(Tier.HOST):
            nodes, costs = distinct_nodes(self.schedule.root), self.profile.blocks
            there = (one for one in nodes if isinstance(one, Update) and one.tier is Tier.HOST)
            took = format_seconds(sum(costs[one.block].part_seconds(one.part, Tier.HOST) for one in there))
            others = len(self.simulation.updated.get(Tier.DEVICE, ()))
            beside = f"; of {others} on the device" if others else ""
            yield "updates", f"of {len(blocks)} blocks in HOST, {took}: the bits of the optimizer on the CPU{beside}"

    def _kept(self) -> Iterator[tuple[str, str]]:
        """What recomputes are spared, where they are."""
        if self.profile.may_keep_inside:
            kept = [action.stage for action in self.schedule if isinstance(action, KeepInside)]
            spared = sum(self.profile.stages[k].inside_seconds for k in kept)
            if kept:
                yield "attention", f"kept by {len(kept)} runs for their recomputes, {format_seconds(spared)} less"

    def _why(self) -> str:
        others = sorted((s, name) for name, s, _ in self.alternatives if s is not None and name != self.planner)
        if not others:
            tried = len(self.alternatives)
            words = f"the only one of {tried} that fits" if tried > 1 else "the only one considered"
            return f"{self.planner or 'given'}, {words}"
        seconds, name = others[0]
        share = seconds / self.seconds - 1 if self.seconds else 0.0
        if share < -5e-4:
            return f"{self.planner}, of {len(others) + 1} that fit; {name}, {-share:.1%} faster, runs or moves more"
        slower = f"takes {share:.1%} longer" if share > 5e-4 else "is no faster"
        return f"{self.planner}, the fastest of {len(others) + 1} that fit; the next best, {name}, {slower}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, readable by its owner only. An existing file is replaced at once.

        Raises StorageError if the folder cannot be written. An existing file is then as it was.
        """
        plan_file.write(
            path,
            {
                "schedule": plan_file.schedule_to_json(self.schedule),
                "profile": plan_file.profile_to_json(self.profile),
                "budget": [self.budget.nbytes(tier) for tier in MEMORIES],
                "machine": plan_file.machine_to_json(self.machine),
                "alternatives": self.alternatives,
            },
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a saved plan and judge it again. Raises InputError if the file is missing, damaged or no plan."""
        with plan_file.reading(path) as document:
            device, host, disk = document["budget"]
            return cls.judged(
                plan_file.schedule_from_json(document["schedule"]),
                plan_file.profile_from_json(document["profile"]),
                Budget(device, host=host, disk=disk),
                plan_file.machine_from_json(document["machine"]),
                plan_file.alternatives_from_json(document["alternatives"]),
            )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw stages over time, memory over time in each tier, and who was busy when. The ending of ``path`` says
        whether as PNG, PDF or SVG.

        Raises InputError if matplotlib is missing or does not know the ending, and for more than a million actions.
        """
        lying = {
            tier: sum(self.profile.block_nbytes(v, at) for v, at in self.schedule.resident if at.memory is tier)
            for tier in MEMORIES
        }
        names = {tier: self.tier_name(tier) for tier in Tier}
        title = (
            f"{len(self.profile)} stages by {self.planner or 'hand'}: {format_seconds(self.seconds)}, "
            f"{self.simulation.forwards} forwards"
        )
        picture.draw(
            path, self.schedule, len(self.profile), self.simulation.timeline, self.budget, lying,
            self.profile.outside_nbytes, names, title,
        )  # fmt: skip


def _outcome(seconds: float | None, reason: str) -> str:
    return f"{'-' if seconds is None else format_seconds(seconds):>8}  {reason}"
