"""The least bytes that a step at steady state must move, whatever is copied when: a linear program.

Given is what a step computes, in its order: the forwards, records, backwards and updates of a plan, with the bytes
that each takes beside parameter blocks (tape, states, transient bytes, what lies outside blocks) as profiled. At each
of these actions the budget less that, and less the values that the action itself uses (a block being updated with its
gradient and its optimizer state), is the room for what is kept from an earlier use to a later one.

Steps repeat, so the uses of a value form a circle, and between two of them lies a gap. The part of a value that is not
kept through a gap has to be read again. Optimizer state and parameters that a step updates have to be written, but for
the part that is kept through every gap; of a gradient, the part that is not kept from the backward to the update is
written and read. So with x in [0, 1] the part kept through a gap and y <= x the part kept through all gaps of a value,

    moved = all reads and writes - sum over gaps of x nbytes - sum over updated values of y nbytes
    for each action: sum over the gaps that it lies in of x nbytes <= its room

and the least of `moved` over x and y is a bound for every schedule of copies, those that cut values into parts
included. A plan that moves whole values can be above it by the grain of the blocks.

The bound depends on the tape, which plans choose for time: less of it leaves more room to blocks. `least_with_any_tape`
knows nothing of the tape, so it is lower, and in general out of reach.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

import tapestream as ts
from tapestream.costs import Profile
from tapestream.ir import Action, Kind, Update, Value
from tapestream.passes.memory import block_values, footprint
from tapestream.passes.stays import needs, read_stays

Matrix = NDArray[np.float64]
_EXACT = 1e-9
_UNIT = 2**20  # bytes: numbers near 1 keep the program's rounding harmless


def least_moved(plan: ts.Plan) -> int:
    """Bytes in both directions together that no schedule of copies for the plan's computation gets below."""
    profile, limit = plan.profile, plan.budget.device_nbytes
    assert limit is not None
    computation, _ = read_stays(plan.schedule, profile)
    sizes, uses = dict(block_values(profile)), _uses(computation, profile)
    inside = footprint(computation, profile).during
    gaps: list[tuple[Value, Matrix]] = []
    for value, positions in uses.items():
        inside[positions] += sizes[value]
        gaps += [(value, gap) for gap in _gaps(value, positions, len(computation))]
    updated = [v for v, at in uses.items() if v.kind is not Kind.GRADIENT and _updates(_at(computation, at))]
    copies = [2 if value.kind is Kind.GRADIENT else 1 for value, _ in gaps] + [1] * len(updated)
    nbytes = [sizes[value] for value, _ in gaps] + [sizes[value] for value in updated]
    gain = np.array([count * size / _UNIT for count, size in zip(copies, nbytes, strict=True)])
    room = np.maximum(limit - inside, 0) / _UNIT
    spared = maximum(gain, *_constraints(gaps, updated, sizes, room))
    return max(0, int((gain.sum() - spared) * _UNIT))


def _constraints(
    gaps: list[tuple[Value, Matrix]], updated: list[Value], sizes: dict[Value, int], room: Matrix
) -> tuple[Matrix, Matrix]:
    """Rows and their limits: bytes kept during each action; y <= x; x <= 1. Columns: every x, then every y."""
    columns = len(gaps) + len(updated)
    kept = np.zeros((len(room), columns))
    for i, (value, gap) in enumerate(gaps):
        kept[:, i] = sizes[value] / _UNIT * gap
    coupled = [(y, x) for y, value in enumerate(updated, len(gaps)) for x, (v, _) in enumerate(gaps) if v == value]
    throughout = np.zeros((len(coupled), columns))
    for row, (y, x) in enumerate(coupled):
        throughout[row, y], throughout[row, x] = 1, -1
    limits = (room, np.zeros(len(coupled)), np.ones(len(gaps)))
    return np.vstack([kept, throughout, np.eye(len(gaps), columns)]), np.concatenate(limits)


def least_with_any_tape(plan: ts.Plan, update: str) -> int:
    """The same for every schedule of a step, its tape and recomputation included, from two moments alone.

    Let P, S, G be the bytes of parameters, optimizer state and gradients, H the budget less what lies outside blocks,
    and H' that less the loss's working set and the last state, at the turn. What a phase needs and was not there at
    its start is read; what it changed and is not there at its end is written: update="backward" reads P - H, then
    P + S - H', and writes P + S - H; update="step" reads P - H, P - H' and P + S + G - H, and writes G - H and
    P + S - H; each at least 0.
    """
    profile, limit = plan.profile, plan.budget.device_nbytes
    assert limit is not None
    room = limit - profile.outside_nbytes
    at_turn = room - profile.turn_nbytes - profile.state_nbytes(len(profile))
    parameters = sum(block.parameters_nbytes for block in profile.blocks)
    gradients = sum(block.gradient_nbytes for block in profile.blocks)
    both = parameters + sum(block.optimizer_state_nbytes for block in profile.blocks)
    if update == "backward":
        moves = [parameters - room, both - at_turn, both - room]
    else:
        moves = [parameters - room, parameters - at_turn, gradients - room, gradients + both - room, both - room]
    return sum(max(0, nbytes) for nbytes in moves)


def maximum(gain: Matrix, rows: Matrix, room: Matrix) -> float:
    """Upper bound, tight up to rounding, of gain x where rows x <= room and x >= 0; room >= 0.

    The simplex method with Bland's rule, which cannot cycle (Bland, New finite pivoting rules for the simplex method,
    1977). The number returned is room times the dual solution, so a rounding error cannot make the bound too low by
    more than itself.
    """
    count = len(room)
    table = np.block([[rows, np.eye(count), room[:, None]], [-gain[None, :], np.zeros((1, count + 1))]])
    basis = list(range(len(gain), len(gain) + count))
    while (entering := np.flatnonzero(table[-1, :-1] < -_EXACT)).size:
        column = int(entering[0])
        usable = np.flatnonzero(table[:-1, column] > _EXACT)
        ratios = table[usable, -1] / table[usable, column]
        tied = usable[ratios <= ratios.min() + _EXACT]
        row = min(tied, key=basis.__getitem__)
        basis[row] = column
        table[row] /= table[row, column]
        others = np.arange(count + 1) != row
        table[others] -= np.outer(table[others, column], table[row])
    prices = np.maximum(table[-1, len(gain) : -1], 0)
    return float(prices @ room)


def _uses(computation: list[Action], profile: Profile) -> dict[Value, list[int]]:
    """Positions of the actions that use each value of a block, in order."""
    uses: dict[Value, list[int]] = {}
    for position, action in enumerate(computation):
        for value in needs(action, profile):
            uses.setdefault(value, []).append(position)
    return uses


def _at(computation: list[Action], positions: list[int]) -> list[Action]:
    return [computation[position] for position in positions]


def _updates(actions: Iterable[Action]) -> bool:
    """Whether one of them is an update, of whatever part."""
    return any(isinstance(action, Update) for action in actions)


def _gaps(value: Value, positions: list[int], length: int) -> Iterator[Matrix]:
    """For each gap between uses the actions (1 in a row of 0) that the value would have to be kept through."""
    circle = [*positions, positions[0] + length]
    for before, after in pairwise(circle):
        gap = np.zeros(length)
        gap[[position % length for position in range(before + 1, after)]] = 1
        if value.kind is Kind.GRADIENT and after >= length:
            return  # a step ends with it
        yield gap
