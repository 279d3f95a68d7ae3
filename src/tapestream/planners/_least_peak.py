"""Segments of least peak: the two objectives of `least_peak` as dynamic programs over bytes along the chain."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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
        stages = profile.stages
        if isinstance(stages, UniformStages):
            stages = [stages.cost] * len(stages)
        # Each column spelled out: reading an attribute by its name in a string takes longer.
        output = _column([cost.output_nbytes for cost in stages])
        saved = _column([cost.saved_nbytes for cost in stages])
        input_read = _column([cost.reads_input for cost in stages])
        output_read = _column([cost.reads_output for cost in stages])
        gradients = _column([cost.gradient_nbytes for cost in stages])
        extra = _column([cost.forward_extra_nbytes for cost in stages])
        record_extra = _column([cost.record_extra_nbytes for cost in stages], extra)
        backward_extra = _column([cost.backward_extra_nbytes for cost in stages])
        cotangents = _column([cost.cotangent_nbytes for cost in stages], output)
        cotangents = np.append(profile.cotangent_nbytes(0), cotangents)
        states = _states(profile, output)
        made = np.append(gradients[::-1].cumsum()[::-1], 0)
        # The tape holds a state, or it is a restart checkpoint, or it is the last, live until the turn.
        held = np.ones_like(states)
        held[1:-1] = input_read[1:] | output_read[:-1]
        tape = np.append(0, (saved + held[1:] * states[1:]).cumsum())
        taped = tape[:-1] + saved
        recording = taped + states[1:] + record_extra + (1 - held[:-1]) * states[:-1]
        backward = taped + cotangents[:-1] + cotangents[1:] + backward_extra + made[:-1] + output_read * states[1:]
        reached = np.maximum(recording + cotangents[1:] + made[1:], backward)
        ends = np.maximum(recording, backward)
        ends[-1] = max(ends[-1], tape[-1] + cotangents[-1] + profile.turn_nbytes)
        last = np.maximum.accumulate(ends[::-1])[::-1] - tape[:-1]
        return cls(states.tolist(), tape.tolist(), reached.tolist(), last.tolist())


def _column(figures: Sequence[int | None], unsaid: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """One figure of every stage; where that is None, ``unsaid``. Quick where all are the same, as most are."""
    first = figures[0]
    if first is None or figures.count(first) < len(figures):
        if unsaid is None:
            return np.array(figures, np.int64)
        if figures.count(None) == len(figures):
            return unsaid
        return np.array([a if b is None else b for a, b in zip(unsaid.tolist(), figures, strict=True)], np.int64)
    return np.full(len(figures), first, np.int64)


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
    the first of that least f is the next ``end`` (ours). ``queue``: the stages left of ``end`` whose f is less than
    that of all between them and j, least f first. ``drops``: the same for what is reached, largest first, of those
    alone after which less is reached, since elsewhere the most is reached right before ``end``.
    """
    states, tape, reached, last = sizes.states, sizes.tape, sizes.reached, sizes.last
    n = end = len(last)
    rest, ends = [0] * n, [n] * n  # f, and where the segment from k ends
    queue, drops = deque[int](), deque[int]()
    fixed = most = after = _MOST  # f(end), largest reached in j .. end-1, reached[j+1]: worse than any at first
    newest = bound = 2 * _MOST  # f(j+1) if in the queue, f of its first
    downwards = (range(n - 1, -1, -1), *map(reversed, (reached, tape[:n], last, states[:n])))
    for j, here, start, whole, kept in zip(*downwards, strict=True):
        if here > after:
            while drops and reached[drops[-1]] <= here:
                drops.pop()
            drops.append(j)
            if here > most:
                most = here
        after = here
        value = most - start
        if value < fixed:
            value = fixed
        while value > bound:
            end = queue.popleft()
            while drops and drops[0] >= end:
                drops.popleft()
            fixed, most = rest[end], reached[end - 1]
            if drops and reached[drops[0]] > most:
                most = reached[drops[0]]
            if queue:
                bound = rest[queue[0]]
            else:
                newest = bound = 2 * _MOST
            value = max(most - start, fixed)
        if value < whole:
            ends[j] = end
        else:
            value = whole
        rest[j] = value = value + kept
        if value <= newest:
            while queue and rest[queue[-1]] >= value:
                queue.pop()
            if not queue:
                bound = value
        newest = value
        queue.append(j)
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
