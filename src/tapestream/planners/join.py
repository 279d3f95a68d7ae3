"""Several chains that meet in one loss (Beaumont, Herrmann, Pallez, Shilova 2020): deep join networks."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import Forward, Keep, Node, Phase, PhaseKind, Restore, Schedule, Series, Shift
from tapestream.planners import rotor
from tapestream.planners._fit import device_limit, device_peak, first_fit, positive
from tapestream.planners._join_tables import Branches, FastestJoin, LeanestJoin, Step
from tapestream.planners._recurrences import freed, recorded, reversed_stages
from tapestream.planners._rotor_tables import Scale

NAME = "join"
Order: TypeAlias = Literal["free", "sweep", "both"]
ORDERS: tuple[Order, ...] = ("free", "sweep", "both")
_PLACES = 3600  # of all branches together; 59 stages each of two
_IN_ORDER = 128  # units of all branches together


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    in_order: Order = "sweep",
    memory_steps: int | None = None,
) -> Schedule:
    """Least seconds within the budget for branches that meet in one turn (`Profile.join`); `rotor` for one chain.

    ``in_order`` says what runs branch by branch as given: "sweep", the first forward, so that random numbers are drawn
    as without a plan (the default); "both", the backward too, from the last branch to the first; "free", nothing.

    The paper minimises recomputed forwards of joins in slots. Its text was not at hand: the recurrence, in bytes and
    seconds, is ours. A place (f_1, .., f_k) says how far each branch is. From there a branch i records its next stage,
    or keeps its state and runs forward to stage j; what was run over is reversed when all further right is done:

      J(f, m) = min over i of min( forward and backward of f_i + J(f + e_i, m - its record),
                                   min over j: forwards f_i .. j-1 + J(f with f_i = j, m - state f_i)
                                               + opt_i(f_i, j-1, m - cotangents and gradients of the others) )

    with opt_i the table of `rotor` for branch i alone. O(n_1 .. n_k (n_1 + .. + n_k) memory_steps).

    "free" and "both" are optimal among memory-persistent schedules with one first sweep that keep a state when its
    forward is about to run and use up first what they kept or recorded last (and, for "both", run in order), but for
    rounding to ``memory_steps`` (at most 2000; None: 300, exact where sizes have a common divisor as in `rotor`) and
    for long branches: beyond 3600 places in all (59 stages each for two branches; "both": 128 stages in all) they are
    cut into runs of stages. "sweep": a "free" schedule, swept in order, may take more bytes on its way to the turn. The
    fastest that fits all the same is taken, or that of "both": no faster one of this kind exists where it takes as long
    as "free", as it does unless the first sweep is what binds.

    Raises BudgetError with the peak of the leanest schedule found, InputError for an unknown order and memory_steps
    below 1.
    """
    if in_order not in ORDERS:
        raise InputError(f"{NAME}: in_order is one of {', '.join(ORDERS)}, not {in_order!r}")
    steps = 300 if memory_steps is None else positive(NAME, "memory_steps", memory_steps, 2000)
    if not profile.ends:
        return replace(rotor.plan(profile, budget, machine, memory_steps=memory_steps), planner=NAME)
    limit = device_limit(budget)
    stored = _stored(profile)
    if limit is None or device_peak(stored, profile) <= limit:
        return Schedule(stored, len(profile), planner=NAME)
    joins = [_branches(profile, ordered) for ordered in ((True,) if in_order == "both" else (True, False))]
    leanest = [LeanestJoin(branches) for branches in joins]
    lean = [_schedule(profile, solved, solved.path(), in_order) for solved in leanest]
    if limit < min(device_peak(root, profile) for root in lean):
        return first_fit(NAME, lean, profile, budget)  # which says what would do
    found = [(solved.seconds, partial(_schedule, profile, solved, solved.path(), in_order)) for solved in leanest]
    for branches in joins:
        if limit > branches.always:
            solved = FastestJoin(branches, Scale.of(limit - branches.always, steps, branches.grain))
            found += [(s, partial(_schedule, profile, solved, solved.path(m), in_order)) for s, m in solved.levels()]
    found.sort(key=lambda pair: pair[0])
    return first_fit(NAME, (make() for _, make in found), profile, budget)


def _branches(profile: Profile, ordered: bool) -> Branches:
    return Branches(profile, _IN_ORDER if ordered else _PLACES, in_order=ordered)


class _Piece(NamedTuple):
    """Some stages of a branch in the first sweep, up to state ``stop``, and how they are reversed."""

    branch: int
    sweep: tuple[Node, ...]
    stop: int
    back: Node


def _stored(profile: Profile) -> Node:
    """Every stage recorded, branch by branch."""
    return _joined(
        profile,
        [
            _Piece(i, (recorded(start, stop),), stop, reversed_stages(start, stop))
            for i, (start, stop) in enumerate(profile.spans)
        ],
    )


def _schedule(profile: Profile, solved: FastestJoin | LeanestJoin, steps: Iterable[Step], in_order: Order) -> Node:
    """The schedule of some steps through the tables."""
    known: rotor.Known = {}
    pieces = []
    for place, i, cut, inside in steps:
        units, start, f = solved.branches.chains[i].units, profile.spans[i][0], place.at[i]
        first, stop = units[f].first, units[f + max(cut, 1) - 1].stop
        if cut:
            sweep: tuple[Node, ...] = Keep(start + first), Forward(start + first, start + stop)
            problem = rotor.Problem(place.held[i], f, f + cut - 1, inside)
            again = rotor.tree_of(solved.solutions[i], (Restore(first), freed(first), problem), known)
            back: Node = Shift(again, start)
        else:
            sweep = (recorded(start + first, start + stop),)
            back = reversed_stages(start + first, start + stop)
        pieces.append(_Piece(i, sweep, start + stop, back))
    return _joined(profile, pieces, swept_in_order=in_order != "free")


def _joined(profile: Profile, pieces: Sequence[_Piece], *, swept_in_order: bool = True) -> Node:
    """The pieces swept, the branches that are not running waiting as kept states; the turn; the last piece reversed
    first."""
    at, running, out = [start for start, _ in profile.spans], 0, list[Node]()
    for piece in sorted(pieces, key=lambda piece: piece.branch) if swept_in_order else pieces:
        if piece.branch != running:
            out += (Keep(at[running]), Restore(at[piece.branch]), freed(at[piece.branch]))
            running = piece.branch
        stays = isinstance(keep := piece.sweep[0], Keep) and out and out[-1] == freed(keep.stage)
        out[len(out) - bool(stays) :] = piece.sweep[bool(stays) :]  # freed and kept again: it simply stays kept
        at[running] = piece.stop
    return Series(
        (Phase(PhaseKind.FORWARD), *out, Phase(PhaseKind.BACKWARD), *(piece.back for piece in reversed(pieces)))
    )
