"""Several chains of which everything is stored: what they hold together, as in plain PyTorch."""

from collections.abc import Sequence

from tapestream.errors import BudgetError
from tapestream.frontends.module.plans.needs import kept_nbytes
from tapestream.ir.actions import Kind
from tapestream.passes.memory import block_values
from tapestream.passes.residence import staying_of
from tapestream.planning.plan import Plan
from tapestream.units import format_nbytes


def stored_nbytes(plans: Sequence[Plan], outside: int) -> int:
    """Most bytes that chains hold whose ``plans`` store everything, in the order of their calls, with what is
    ``outside``.

    While one of them runs, those before it hold their tape, and those after it the gradients that they have made. They
    are never at their peaks at once, which is what a budget for each would allow for.
    """
    staying = [staying_of(plan.schedule) for plan in plans]
    values = [dict(block_values(plan.profile)) for plan in plans]
    always = [sum(values[k].get(value, 0) for value in staying[k]) for k in range(len(plans))]
    made = [
        sum(nbytes for value, nbytes in values[k].items() if value.kind is Kind.GRADIENT and value not in staying[k])
        for k in range(len(plans))
    ]
    kept = [kept_nbytes(plan.profile) for plan in plans]
    own = [plan.peak_nbytes - plan.profile.outside_nbytes - always[k] for k, plan in enumerate(plans)]
    running = (sum(kept[:k]) + sum(made[k + 1 :]) + own[k] for k in range(len(plans)))
    updating = max((cost.update_extra_nbytes for plan in plans for cost in plan.profile.blocks), default=0)
    return outside + sum(always) + max(*running, sum(made) + updating)


def too_little_stored(allowed: int, needed: int, chains: int) -> BudgetError:
    """``allowed`` bytes are too few for several chains, which take ``needed`` at least, with everything stored."""
    return BudgetError(
        f"a budget of {format_nbytes(allowed)} was asked for; with {chains} chains of blocks, to store everything "
        f"as plain PyTorch does takes least: allow {needed} bytes ({format_nbytes(needed)}), use a smaller "
        "batch, or make what lies between the blocks a part of them, so that they are one chain",
        least_nbytes=needed,
    )
