"""Budgets that work for a call of several chains, as a refusal names them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tapestream.costs import Profile
from tapestream.errors import BudgetError
from tapestream.frontends.module.plans.needs import blocks_nbytes, kept_nbytes
from tapestream.planning.allowances import allowances
from tapestream.planning.plan import Plan

_MOST_STAGES = 64
"""Of all chains: the plans of longer ones take too long to wait for an error."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """All plans of a call, as one step."""

    plans: Sequence[Plan]
    peak_nbytes: int
    fills: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of all chains."""
        return sum(plan.seconds for plan in self.plans)

    @property
    def overhead(self) -> float:
        """These over the seconds with everything stored."""
        stored = sum(plan.stored_seconds for plan in self.plans)
        return self.seconds / stored if stored else 1.0


def ample_nbytes(profiles: Sequence[Profile]) -> int:
    """More than any plan of these chains holds."""
    return sum(
        2 * (profile.outside_nbytes + profile.turn_nbytes + kept_nbytes(profile) + blocks_nbytes(profile))
        + sum(
            cost.forward_extra_nbytes + abs(cost.backward_extra_nbytes) + (cost.record_extra_nbytes or 0)
            + 2 * cost.cotangent_bytes for cost in profile.stages
        )
        + 2 * sum(cost.update_extra_nbytes for cost in profile.blocks)
        for profile in profiles
    )  # fmt: skip


def offering(
    refused: BudgetError, within: Callable[[int | None], PlannedCall], profiles: Sequence[Profile]
) -> BudgetError:
    """``refused`` with budgets that work for all ``profiles``, if nobody knows any yet and finding them is quick.
    ``within``: plans within so many bytes of the device, None for no limit."""
    least = refused.least_nbytes
    if refused.offers is not None or least is None or sum(map(len, profiles)) > _MOST_STAGES:
        return refused
    offers = partial(allowances, within, least)
    return BudgetError(refused.message, least_nbytes=least, stage=refused.stage, split=refused.split, offers=offers)
