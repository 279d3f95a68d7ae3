"""`Answer`: the plans of one training step, one for each chain of blocks, and what they take together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tapestream.costs import Profile
from tapestream.errors import BudgetError
from tapestream.ir.actions import Tier
from tapestream.planning.plan import Plan
from tapestream.units import format_nbytes


@dataclass(frozen=True, slots=True)
class Answer:
    """Plans of chains that run one after the other, each within its part of the device (`divided`)."""

    plans: tuple[Plan, ...]

    @property
    def seconds(self) -> float:
        """Of one step."""
        return sum(plan.seconds for plan in self.plans)

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
        """Stage evaluations of one step, recorded ones included."""
        return sum(plan.simulation.forwards for plan in self.plans)

    @property
    def moved_nbytes(self) -> int:
        """Bytes that cross links in one step."""
        return sum(sum(plan.simulation.bytes_moved.values()) for plan in self.plans)

    @property
    def planner(self) -> str:
        """Who made the plans."""
        return ", ".join(dict.fromkeys(plan.planner for plan in self.plans))

    @property
    def written_nbytes(self) -> int:
        """Bytes written to the disk in one step."""
        moved = (item for plan in self.plans for item in plan.simulation.bytes_moved.items())
        return sum(nbytes for (_, target), nbytes in moved if target is Tier.DISK)

    def peak_nbytes(self, tier: Tier) -> int:
        """Most bytes held in ``tier``: the chains' sum, what lies outside blocks once."""
        again = self.plans[0].profile.outside_nbytes * (len(self.plans) - 1) if tier is Tier.DEVICE else 0
        return sum(plan.simulation.peak_nbytes[tier] for plan in self.plans) - again

    def __str__(self) -> str:
        return "\n".join(str(plan) for plan in self.plans)


def divided(profiles: Sequence[Profile], allowed: int, plan: Callable[[Profile, int], Plan]) -> Answer:
    """``plan`` each profile: every chain gets the least that it needs, and of the rest in proportion to its bytes.

    Raises BudgetError when the least is too much.
    """
    if len(profiles) == 1:
        return Answer((plan(profiles[0], allowed),))
    outside = profiles[0].outside_nbytes
    least = [_least(profile, outside, plan) for profile in profiles]
    room = allowed - outside - sum(least)
    if room < 0:
        raise BudgetError(
            f"a device budget of {format_nbytes(allowed)} was asked for; {len(profiles)} chains of blocks need "
            f"{format_nbytes(sum(least))} at least, and what lies outside them {format_nbytes(outside)}. Allow "
            f"{format_nbytes(outside + sum(least))}, or use a smaller batch",
            least_nbytes=outside + sum(least),
        )
    needs = [_needs(profile) for profile in profiles]
    shares = [a + room * need // max(1, sum(needs)) for a, need in zip(least, needs, strict=True)]
    return Answer(tuple(plan(profile, outside + share) for profile, share in zip(profiles, shares, strict=True)))


def _least(profile: Profile, outside: int, plan: Callable[[Profile, int], Plan]) -> int:
    try:
        plan(profile, outside + 1)
    except BudgetError as error:
        if error.least_nbytes is None:
            raise  # the host or the disk is too small
        return error.least_nbytes - outside
    return 1


def _needs(profile: Profile) -> int:
    tape = sum(cost.saved_nbytes + cost.output_nbytes for cost in profile.stages)
    return tape + sum(b.parameters_nbytes + b.buffers_nbytes + b.gradient_nbytes for b in profile.blocks)
