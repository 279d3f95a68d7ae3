"""The least peak when each segment is recomputed once (Hong et al. 2025, arXiv 2502.12499)."""

from itertools import pairwise
from typing import Literal

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import Forward, Keep, Node, Phase, PhaseKind, Restore, Schedule, Series, Shift
from tapestream.planners._fit import first_fit
from tapestream.planners._least_peak import Sizes, freed_early, kept_to_the_end
from tapestream.planners._recurrences import freed, recorded, reversed_stages, turn

NAME = "least_peak"
_LONGEST_B = 5000


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    objective: Literal["A", "B"] = "A",
    sizes: Literal["tape", "states"] = "tape",
) -> Schedule:
    """The restart checkpoints of least device peak, every segment but the last recomputed once; seconds do not count.

    ``objective`` "A": a restart checkpoint goes when its segment is done, O(n). "B": all stay to the end, O(n^3) at
    most, up to 5000 stages; the schedule frees them early all the same, so it stays under what B counts. ``sizes``
    "states" looks at a_0 .. a_n alone, the paper's I(j, k) = a_{j+1} + ... + a_k; "tape" also at saved tensors, states
    that backward reads, cotangents, transient bytes, gradients that stay and the turn. The paper gives the problem,
    both objectives and their orders of growth; the formulas and both programs here are ours. "A" with "tape" is
    optimal among these schedules where every stage reads its input and not its output and nothing is transient or
    carried; elsewhere bytes may be counted a little too high. The budget only decides whether the schedule will do:
    with room to spare `rotor` is faster. Nodes in proportion to segments. Raises BudgetError with the peak, InputError
    for other knobs and for "B" on a longer chain.
    """
    n = len(profile)
    if objective not in ("A", "B"):
        raise InputError(f"{NAME}: objective is 'A' or 'B', not {objective!r}")
    if sizes not in ("tape", "states"):
        raise InputError(f"{NAME}: sizes is 'tape' or 'states', not {sizes!r}")
    if objective == "B" and n > _LONGEST_B:
        raise InputError(f"{NAME}: objective 'B' takes at most {_LONGEST_B} stages, not {n}; use objective='A'")
    solve = freed_early if objective == "A" else kept_to_the_end
    # Not named, so that lists as long as the chain are gone before the tree is made.
    cuts = solve(Sizes.of_profile(profile) if sizes == "tape" else Sizes.of_states(_states(profile)))
    return first_fit(NAME, [_tree(n, cuts.checkpoints)], profile, budget)


def _states(profile: Profile) -> list[int]:
    return [profile.initial_nbytes, *(cost.output_nbytes for cost in profile.stages)]


def _tree(n: int, checkpoints: list[int]) -> Node:
    """Segments between 0, ``checkpoints`` and n; the last one is recorded in the first sweep."""
    sweep: list[Node] = [Phase(PhaseKind.FORWARD)]
    back: list[Node] = []
    again: dict[int, Node] = {}  # segments as long as each other share a node
    start = 0
    for first, stop in pairwise((0, *checkpoints)):
        sweep += (Keep(first), Forward(first, stop))
        length = stop - first
        if length not in again:
            again[length] = Series((Restore(0), freed(0), recorded(0, length), reversed_stages(0, length)))
        back.append(Shift(again[length], first) if first else again[length])
        start = stop
    return Series((*sweep, *turn(start, n), *reversed(back)))
