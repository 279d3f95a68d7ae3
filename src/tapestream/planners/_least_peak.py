"""Segments of least peak: the two objectives of `least_peak` as dynamic programs over bytes along the chain."""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapestream.costs import Profile, UniformStages

_MOST = 1 << 100  # above any number of bytes


class Cuts(NamedTuple):
    """``nbytes`` at the peak by the objective, and the restart checkpoints besides state 0, ascending."""

    nbytes: int
    checkpoints: list[int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that the objectives look at, n stages in all.

    ``states[k]``: state k as restart checkpoint. ``tape[k]``: held by recorded stages 0 .. k-1, so a segment from j on
    holds tape[k] - tape[j]. ``reached[k]``: tape[k] and what is there besides while stage k is recorded or reversed.
    I(j, k) = max of reached[j .. k-1] - tape[j] are the bytes inside segment j .. k-1; it grows with k and shrinks with
    j. ``last[j]``: bytes inside the segment j .. n-1, which is recorded in the first sweep.
    """

    states: list[int]
    tape: list[int]
    reached: list[int]
    last: list[int]

    @classmethod
    def of_states(cls, states: list[int]) -> "Sizes":
        """The published formula: I(j, k) = a_{j+1} + ... + a_k."""
        tape = list(accumulate(states))
        return cls(states, tape, tape[1:], [tape[-1] - held for held in tape[:-1]])

    @classmethod
    def of_profile(cls, profile: Profile) -> "Sizes":
        """With saved tensors, states where backward reads them, cotangents, gradients that stay, and the turn."""
        output, column = _column(profile, "output_nbytes"), partial(_column, profile)
        states = _states(profile, output)
        saved, output_read = column("saved_nbytes"), column("reads_output")
        cotangents = np.append(profile.cotangent_nbytes(0), column("cotangent_nbytes", output))
        made = np.append(column("gradient_nbytes")[::-1].cumsum()[::-1], 0)
        # The tape holds a state, or it is a restart checkpoint, or it is the last, live until the turn.
        held = np.ones_like(states)
        held[1:-1] = column("reads_input")[1:] | output_read[:-1]
        tape = np.append(0, (saved + held[1:] * states[1:]).cumsum())
        taped = tape[:-1] + saved
        recording = taped + states[1:] + column("record_extra_nbytes", column("forward_extra_nbytes"))
        recording += (1 - held[:-1]) * states[:-1]
        backward = taped + cotangents[:-1] + cotangents[1:] + column("backward_extra_nbytes") + made[:-1]
        backward += output_read * states[1:]
        reached = np.maximum(recording + cotangents[1:] + made[1:], backward)
        ends = np.maximum(recording, backward)
        ends[-1] = max(ends[-1], tape[-1] + cotangents[-1] + profile.turn_nbytes)
        last = np.maximum.accumulate(ends[::-1])[::-1] - tape[:-1]
        return cls(states.tolist(), tape.tolist(), reached.tolist(), last.tolist())


def _column(profile: Profile, name: str, unsaid: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """One figure of every stage; where that is None, ``unsaid``."""
    stages, figure = profile.stages, attrgetter(name)
    if isinstance(stages, UniformStages):
        value = figure(stages.cost)
        return unsaid if value is None and unsaid is not None else np.full(len(stages), value, np.int64)
    if unsaid is None:
        return np.fromiter(map(figure, stages), np.int64, len(stages))
    said = list(map(figure, stages))
    if said.count(None) == len(said):
        return unsaid
    return np.array([a if b is None else b for a, b in zip(unsaid.tolist(), said, strict=True)])


def _states(profile: Profile, output: NDArray[np.int64]) -> NDArray[np.int64]:
    """Carried storages count with each state that holds them, unless all states do: those are there anyway."""
    n = len(profile)
    states = np.append(profile.initial_nbytes, output)
    for shared in profile.carried:
        first, last = max(shared.first, 0), min(shared.last, n)
        if last - first < n:
            states[first : last + 1] += shared.nbytes
    return states


def freed_early(sizes: Sizes) -> Cuts:
    """Objective A: a restart checkpoint goes when its segment is done. O(n).

    M(j) = min(last(j), min over k > j of max(I(j, k), f(k))) with f(k) = a_k + M(k), the answer a_0 + M(0). As j falls,
    I(j, k) grows and f stays. So with ``end`` the best k so far: those to its right never come back; those to its left
    have less inside, and become better only when what ``end`` gives exceeds the least f among them, ``bound``, and then
    the first of that least f is the next ``end``. Least f and largest reached between j and ``end`` are those of a
    front, which grows to the left of ``middle``, and of a back, stored for every number of its stages; when the least
    lies in the front, that becomes the back. Each stage enters a back once (ours).
    """
    states, tape, reached, last = sizes.states, sizes.tape, sizes.reached, sizes.last
    n = middle = end = len(last)
    rest, ends = [0] * n, [n] * n  # f, and where the segment from k ends
    fixed = most = _MOST  # f(end), largest reached in j .. end-1: worse than any at first
    least = bound = 2 * _MOST  # of f: in the front, in front and back
    low, high, left, front = [2 * _MOST], [0], 0, 0  # ``left`` stages of the back lie before end
    downwards = (range(n - 1, -1, -1), *map(reversed, (reached, tape[:n], last, states[:n])))
    for j, added, here, whole, kept in zip(*downwards, strict=True):
        if added > front:
            front = added
            most = max(most, front)
        value = most - here
        if value < fixed:
            value = fixed
        while value > bound:
            if least < low[left]:
                left, middle = middle - j - 1, j + 1
                low = [2 * _MOST, *accumulate(rest[middle : middle + left], min)]
                high = [0, *accumulate(reached[middle : middle + left], max)]
                front, least = added, 2 * _MOST
            fixed = low[left]
            while low[left] == fixed:
                left -= 1
            end, bound = middle + left, min(least, low[left])
            most = max(front, high[left])
            value = max(most - here, fixed)
        if value < whole:
            ends[j] = end
        else:
            value = whole
        value += kept
        rest[j] = value
        if value < least:
            least = value
            if value < bound:
                bound = value
    return Cuts(rest[0], _path(ends))


def _path(ends: list[int]) -> list[int]:
    found, at = [], ends[0]
    while at < len(ends):
        found.append(at)
        at = ends[at]
    return found


def kept_to_the_end(sizes: Sizes) -> Cuts:
    """Objective B: every restart checkpoint stays: a_0 + sum of a_c + the largest I. O(n^3) at most.

    kept(X), the least sum under the cap I <= X, falls as X grows; a solution whose largest I is Y settles all caps from
    Y to X. Caps are tried from the middle of what is open, and where even the least cap above ``low`` together with
    kept(X) is no better than the best found, that whole range is left out (ours; the paper tries every cap).
    """
    found = _capped(sizes, sizes.last[0])
    assert found is not None  # the whole chain in one segment
    best = Cuts(found[0] + found[1], found[2])
    open_ranges = [(-1, found[1] - 1, found[0])]  # (low, high, a bound of kept): low < X <= high
    while open_ranges:
        low, cap, bound = open_ranges.pop()
        if low >= cap or low + 1 + bound >= best.nbytes:
            continue
        middle = (low + cap + 1) // 2
        found = _capped(sizes, middle)
        open_ranges.append((middle, cap, bound))
        if found is None:
            continue
        kept, largest, checkpoints = found
        best = min(best, Cuts(kept + largest, checkpoints), key=lambda cuts: cuts.nbytes)
        open_ranges.append((low, largest - 1, kept))
    return best


def _capped(sizes: Sizes, cap: int) -> tuple[int, int, list[int]] | None:
    """Least bytes of restart checkpoints with at most ``cap`` inside every segment, the largest inside, and which.

    D(k) = a_k + min of D(j) over j with I(j, k) <= cap: a window whose start only moves right. O(n log n).
    """
    states, tape, reached, last = sizes.states, sizes.tape, sizes.reached, sizes.last
    n = len(last)
    sums, before = [states[0]], [0]
    window, start = deque([0]), 0
    for k in range(1, n):
        start = max(start, bisect_left(tape, reached[k - 1] - cap))
        if start >= k:
            break  # stage k-1 alone exceeds the cap, so nothing can start behind it
        while window[0] < start:
            window.popleft()
        before.append(window[0])
        sums.append(states[k] + sums[window[0]])
        while window and sums[window[-1]] >= sums[k]:
            window.pop()
        window.append(k)
    least = min((j for j in range(len(sums)) if last[j] <= cap), key=sums.__getitem__, default=None)
    if least is None:
        return None
    largest, checkpoints, at = last[least], [], least
    while at:
        checkpoints.append(at)
        largest = max(largest, max(reached[before[at] : at]) - tape[before[at]])
        at = before[at]
    return sums[least], largest, checkpoints[::-1]
