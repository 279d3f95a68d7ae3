"""Every state to a slower tier and back while computation goes on: offload alone, nothing chosen."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import (
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Node,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Repeat,
    Restore,
    Schedule,
    Series,
    Shift,
    Tier,
    Value,
    Wait,
)
from tapestream.planners._fit import positive
from tapestream.planners._judged import Candidate, direct_tier, fastest_fit
from tapestream.planners._least_peak import Sizes
from tapestream.planners._recurrences import freed, recorded, reversed_stages
from tapestream.planners._tiers import DEVICE
from tapestream.planners.store_all import stored

NAME = "offload"
_AHEAD = (1, 2, 4, 0)


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    tail: int | None = None,
    ahead: int | None = None,
    tier: Tier | str | None = None,
) -> Schedule:
    """Every state before the last ``tail`` stages goes to ``tier`` and comes back for the backward of its stage.

    The tape itself stays where it is made, so a stage before the tail is recorded again from its state, once, right
    before its backward; stages of the tail are recorded in the first sweep. Device memory besides the tail's tape: one
    record, and ``ahead`` states on their way in each direction (0: every copy is waited for at once). Least seconds, by
    the judge with overlap, over fixed lists of both knobs where they are left out; not optimal, since nothing is chosen
    state by state. ``tier`` left out: the fastest linked to the device. Any chain; a number of nodes that does not grow
    with n; one simulation, O(n), for each candidate tried. Raises BudgetError when a tier is too small, InputError for
    knobs out of range and a tier without a direct link.
    """
    n = len(profile)
    target = direct_tier(NAME, machine, tier)
    tails = _tails(n) if tail is None else [positive(NAME, "tail", tail, n)]
    if ahead is not None and (isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0):
        raise InputError(f"{NAME}: ahead must be a whole number of at least 0, not {ahead!r}")
    depths = _AHEAD if ahead is None else (min(ahead, n),)
    return fastest_fit(NAME, candidates(profile, target, tails, depths), profile, Budget.of(budget), machine)


def candidates(
    profile: Profile, target: Tier, tails: Sequence[int] | None = None, depths: Sequence[int] = _AHEAD
) -> Iterator[Candidate]:
    """What `plan` chooses from, least seconds of computation first; knobs left out: their fixed lists."""
    n = len(profile)
    forward = list(accumulate((cost.forward_seconds for cost in profile.stages), initial=0.0))
    always = sum(cost.recorded_seconds + cost.backward_seconds for cost in profile.stages) + profile.turn_seconds
    tape = Sizes.of_profile(replace(profile, carried=())).tape
    turn = profile.outside_nbytes + profile.cotangent_nbytes(n) + profile.turn_nbytes  # bytes then, beside the tape
    for length in sorted(tails or _tails(n), reverse=True):
        for depth in depths if length < n else (0,):
            nbytes = turn + tape[n] - tape[n - length]
            yield Candidate(always + forward[n - length], _tree(n, n - length, depth, target), nbytes)


def _tails(n: int) -> list[int]:
    """Up to 8 stages, then a half more each time, and all."""
    found = list(range(1, min(n, 8)))
    while found and found[-1] * 3 // 2 < n and n > 8:
        found.append(found[-1] * 3 // 2)
    return [*found, n]


def _tree(n: int, start: int, ahead: int, tier: Tier) -> Node:
    """States 0 .. start-1 go to ``tier``; stages start .. n-1 are recorded in the first sweep."""
    if not start:
        return stored(n)
    ahead = min(ahead, start)
    here = Value(Kind.STATE, 0)
    leave: tuple[Node, ...] = (Keep(0), Offload(here, DEVICE, tier))
    gone = Series((Wait(here, tier), Free(here, DEVICE)))
    come = Prefetch(here, tier, DEVICE)
    first = Series((*leave, Forward(0, 1)))
    then = Series((*(Shift(node, ahead) for node in leave), gone, Forward(ahead, ahead + 1)))
    again = Series((
        Wait(here, DEVICE), Free(here, tier), Restore(0), freed(0), Record(0), Backward(0),
    ))  # fmt: skip
    out = Repeat(first, ahead, 1), Repeat(then, start - ahead, 1)
    ahead_of = Series((come, Shift(again, ahead)))
    back = Repeat(Shift(ahead_of, start - 1 - ahead), start - ahead, -1), Repeat(Shift(again, ahead - 1), ahead, -1)
    tail = _tail(n, start, ahead, gone, come)
    return Series((Phase(PhaseKind.FORWARD), *out, *tail, *back))


def _tail(n: int, start: int, ahead: int, gone: Node, come: Node) -> tuple[Node, ...]:
    """Record and reverse the tail; the last copies out end behind its first stages, the first copies in start behind
    its last."""
    beside = min(ahead, n - start)
    late = start - ahead  # the first state still on its way out
    settle = [Repeat(Shift(gone, late + beside), ahead - beside, 1)] if ahead > beside else []
    early = [Repeat(Shift(come, start - 1), ahead - beside, -1)] if ahead > beside else []
    record = Repeat(Series((Record(start), Shift(gone, late))), beside, 1)
    reverse = Repeat(Series((Shift(come, start - 1 - ahead + beside), Backward(start + beside - 1))), beside, -1)
    middle = start + beside
    rest = [recorded(middle, n)] if middle < n else []
    rest_back = [reversed_stages(middle, n)] if middle < n else []
    return (record, *settle, *rest, Phase(PhaseKind.BACKWARD), *rest_back, *early, reverse)
