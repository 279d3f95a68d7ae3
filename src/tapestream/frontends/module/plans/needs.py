"""What segments need of the device, and what their plans come to."""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from tapestream.costs import Profile
from tapestream.errors import BudgetError
from tapestream.passes.memory import block_values
from tapestream.planning.plan import Plan
from tapestream.units import format_nbytes


def least_beside(plan: Callable[[int], Plan], outside: int) -> int:
    """Bytes beside ``outside`` that ``plan``, given a budget, cannot do without."""
    try:
        plan(outside + 1)
    except BudgetError as error:
        if error.least_nbytes is None:
            raise  # the host or the disk is too small
        return error.least_nbytes - outside
    return 1


def kept_nbytes(profile: Profile) -> int:
    """Bytes that a segment holds from its forward to its backward, when nothing of it is recomputed."""
    return profile.initial_nbytes + sum(cost.saved_nbytes + cost.output_nbytes for cost in profile.stages)


def most_needed(least: Mapping[int, int], kept: Mapping[int, int]) -> int:
    """Bytes of the guest that needs most, beside what the others keep."""
    together = sum(kept.values())
    return max(least[number] + together - kept[number] for number in least)


def blocks_nbytes(profile: Profile) -> int:
    """Bytes of all values of a profile's blocks."""
    return sum(nbytes for _, nbytes in block_values(profile))


def loses(plan: Plan) -> bool:
    """Whether it recomputes or moves anything, so that with more room it could be faster."""
    return bool(plan.simulation.bytes_moved) or plan.simulation.forwards > plan.profile.runs


def seconds_of(plans: Sequence[Plan]) -> float:
    """Seconds of a step by all of them."""
    return sum(plan.seconds for plan in plans)


def shares_of(profiles: Sequence[Profile], nbytes: int) -> list[int]:
    """``nbytes`` divided between chains in proportion to what they hold."""
    needs = [
        sum(cost.saved_nbytes + cost.output_nbytes for cost in profile.stages)
        + sum(b.parameters_nbytes + b.buffers_nbytes + b.gradient_nbytes for b in profile.blocks)
        for profile in profiles
    ]
    total = max(1, sum(needs))
    return [nbytes * need // total for need in needs]


def too_little(allowed: int, outside: int, least: int) -> BudgetError:
    """``allowed`` bytes are too few for chains that need ``least`` beside what is ``outside``."""
    return BudgetError(
        f"a budget of {format_nbytes(allowed)} was asked for, but what lies outside the blocks (parameters, "
        "their gradients and optimizer state, buffers, embeddings; on a GPU the workspaces of products) takes "
        f"{format_nbytes(outside)} and the blocks need at least {format_nbytes(least)} beside it; allow "
        f"{outside + least} bytes, use a smaller batch, or name more blocks with blocks=[...]",
        least_nbytes=outside + least,
    )


def too_little_beside(allowed: int, needed: int, largest: nn.Module, most: str) -> BudgetError:
    """``allowed`` bytes are too few for guests, of which the ``largest`` needs all; ``most``: of what kind they are."""
    nbytes = sum(p.nbytes for p in largest.parameters())
    return BudgetError(
        f"a budget of {format_nbytes(allowed)} was asked for, but what runs beside the repeated blocks needs "
        f"{format_nbytes(needed)} at its peak (the largest: {type(largest).__name__} of "
        f"{format_nbytes(nbytes)}, where {most}); allow {needed} bytes, or use a smaller batch",
        least_nbytes=needed,
    )
