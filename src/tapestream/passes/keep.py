"""Keeping values on the device between their uses: within a phase, into the step phase, into the next step.

What is there when a phase ends lives there as far as users can see, so it is not assumed to be at home unchanged: it
must be updated and written afterwards anyway. That is so for parameters, gradients and optimizer state that the
schedule updates, and for nothing else.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapestream.ir import Action, Kind, Tier, Value
from tapestream.passes.issue import BARRIERS
from tapestream.passes.memory import Footprint, Nbytes
from tapestream.passes.stays import Occupancy, Stay, successors

_ROUNDS = (8, 3)
_MANY = 2000  # choices, for which the fewer rounds must do
_AT_ONCE = 256  # choices of which those are dropped that do not fit
_STEEP = 6  # the price of room at an action is how full it is, to this power


class _Gap(NamedTuple):
    """Where a value of ``nbytes`` is not needed: after stay ``earlier`` and before ``later``, its first stay where the
    gap leads into the next step. Keeping it spares ``saves`` copies a step."""

    earlier: int
    later: int
    nbytes: int
    spans: tuple[tuple[int, int], ...]
    saves: int = 1


class _Choice(NamedTuple):
    """Numbers of gaps to keep together; that spares ``saves`` copies, ``more`` of them beyond those of each gap."""

    gaps: tuple[int, ...]
    saves: int
    more: int = 0


class _Gaps(list[_Gap]):
    """All gaps, by number."""

    def choice(self, gap: _Gap) -> _Choice:
        """Of a new one alone."""
        self.append(gap)
        return self.together([len(self) - 1])

    def together(self, numbers: Iterable[int], more: int = 0) -> _Choice:
        """Of known ones."""
        gaps = tuple(numbers)
        return _Choice(gaps, sum(self[gap].saves for gap in gaps) + more, more)


def kept_between(
    computation: Sequence[Action],
    stays: list[Stay],
    base: Footprint,
    allowed_nbytes: int | None,
    *,
    across: bool = False,
) -> list[Stay]:
    """Successive stays of one value made into one where memory allows it to remain.

    ``across``: from one phase to another too, and throughout. Greedy, most bytes spared for the room taken first, a
    few times over with room priced by how full the time before left it; the best is taken. Not optimal. Linear in
    the product of uses and actions.
    """
    gaps = _Gaps()
    choices = list(_choices(computation, stays, across, gaps))
    empty = Occupancy(base, stays).nbytes
    allowed = int(empty.max()) + sum(stay.nbytes for stay in stays) if allowed_nbytes is None else allowed_nbytes
    room, price = _Room(gaps, choices), np.ones(len(computation))
    best: tuple[int, set[int]] = (0, set())
    before: set[int] | None = None
    for _ in range(_ROUNDS[len(choices) > _MANY]):
        held, taken = empty.copy(), set[int]()
        order = room.cheapest_first(price)
        for first in range(0, len(order), _AT_ONCE):
            some = order[first : first + _AT_ONCE]
            for number in some[room.may_fit(some, held, taken, allowed)].tolist():
                _take(choices[number], gaps, held, taken, allowed)
        best = max(best, (_spared(choices, gaps, taken), taken), key=lambda found: found[0])
        if len(taken) == len(gaps) or taken == before:  # nothing is left to take, or prices lead here again
            break
        before = taken
        price = (held / max(1, allowed)) ** _STEEP
    return _joined(stays, [gaps[gap] for gap in sorted(best[1])], len(computation) - 1)


class _Room:
    """What choices need, as arrays: where each span of each gap begins and ends, and the gaps of each choice."""

    def __init__(self, gaps: Sequence[_Gap], choices: Sequence[_Choice]) -> None:
        spans = [(start, stop, number) for number, gap in enumerate(gaps) for start, stop in gap.spans]
        table = np.array(spans, dtype=np.int64).reshape(-1, 3)
        self._ends, self._gap_of_span = table[:, :2], table[:, 2].copy()
        self._long = self._ends[:, 0] < self._ends[:, 1]
        self._nbytes = np.array([gap.nbytes for gap in gaps], dtype=np.int64)
        self._gaps = np.array([gap for choice in choices for gap in choice.gaps], dtype=np.int64)
        self._choice_of_gap = np.repeat(np.arange(len(choices)), [len(choice.gaps) for choice in choices])
        self._saves = np.array([choice.saves for choice in choices], dtype=np.int64)

    def cheapest_first(self, price: NDArray[np.float64]) -> NDArray[np.int64]:
        """Numbers of choices, by the price of room for each copy spared."""
        total = np.concatenate([[0.0], np.cumsum(price)])
        spans = total[self._ends[:, 1]] - total[self._ends[:, 0]]
        prices = np.bincount(self._gap_of_span, spans, minlength=len(self._nbytes))
        choices = np.bincount(self._choice_of_gap, prices[self._gaps], minlength=len(self._saves))
        return np.argsort(choices / self._saves, kind="stable")

    def may_fit(self, some: NDArray[np.int64], held: Nbytes, taken: set[int], allowed: int) -> NDArray[np.bool_]:
        """Of ``some`` choices, those that fit beside what is ``held`` now, each by itself: of the others nothing that
        is kept besides will make room."""
        asked = np.zeros(len(self._saves), dtype=bool)
        asked[some] = True
        wanted = asked[self._choice_of_gap]
        left = np.zeros(len(self._nbytes), dtype=bool)
        left[self._gaps[wanted]] = True
        left[list(taken)] = False
        spans = np.flatnonzero(left[self._gap_of_span] & self._long)
        gap, ends = self._gap_of_span[spans], self._ends[spans].ravel()
        most = np.maximum.reduceat(np.append(held, 0), ends)[::2] if len(ends) else ends
        left[:] = False
        left[gap[most + self._nbytes[gap] > allowed]] = True
        asked[self._choice_of_gap[wanted & left[self._gaps]]] = False
        return asked[some]


def _take(choice: _Choice, gaps: Sequence[_Gap], held: Nbytes, taken: set[int], allowed: int) -> None:
    """Keep what is left of a choice if there is room."""
    left = choice.gaps if taken.isdisjoint(choice.gaps) else [gap for gap in choice.gaps if gap not in taken]
    spans = []
    for gap in left:  # the ends first: where all is full, they say so at once
        nbytes = gaps[gap].nbytes
        for start, stop in gaps[gap].spans:
            if start < stop:
                if held[start] + nbytes > allowed or held[stop - 1] + nbytes > allowed:
                    return
                spans.append((held[start:stop], nbytes))
    for part, nbytes in spans:
        if np.maximum.reduce(part) + nbytes > allowed:
            return
    taken.update(left)
    for part, nbytes in spans:
        part += nbytes


def _spared(choices: Sequence[_Choice], gaps: Sequence[_Gap], taken: set[int]) -> int:
    """Bytes that need not move."""
    whole = sum(
        choice.more * gaps[choice.gaps[0]].nbytes for choice in choices if choice.more and taken.issuperset(choice.gaps)
    )
    return whole + sum(gaps[gap].saves * gaps[gap].nbytes for gap in taken)


def _choices(computation: Sequence[Action], stays: Sequence[Stay], across: bool, gaps: _Gaps) -> Iterator[_Choice]:
    """Single gaps, and for values that may stay throughout all of theirs; all of them put into ``gaps``."""
    phase = np.cumsum([action in BARRIERS for action in computation])
    end = len(computation)
    visits: defaultdict[Value, list[int]] = defaultdict(list)
    inner: defaultdict[Value, list[int]] = defaultdict(list)
    for i, stay in enumerate(stays):
        visits[stay.value].append(i)
    for earlier, later in successors(stays):
        here, there = stays[earlier], stays[later]
        together, spans = phase[here.stop] == phase[there.start], ((here.stop + 1, there.start),)
        if here.value.kind is Kind.GRADIENT:
            if across and here.leave and not together and not there.leave:  # users see it until the step has ended
                yield gaps.choice(_Gap(earlier, later, here.nbytes, (*spans, (there.stop + 1, end)), 2))
        elif here.free == (there.tier,) and there.arrive and (together or (across and there.leave)):
            inner[here.value].append(len(gaps))
            yield gaps.choice(_Gap(earlier, later, here.nbytes, spans))
    for value, indices in visits.items() if across else ():
        first, last = indices[0], indices[-1]
        if value.kind is not Kind.GRADIENT and stays[first].arrive and len(inner[value]) == len(indices) - 1:
            around = _Gap(last, first, stays[first].nbytes, ((0, stays[first].start), (stays[last].stop + 1, end)))
            written, number = bool(stays[last].leave), len(gaps)
            gaps.append(around)
            if written and first != last and value.kind is Kind.PARAMETERS:
                yield gaps.together([number])
            yield gaps.together([*inner[value], number], more=int(written))


def _joined(stays: Sequence[Stay], taken: Sequence[_Gap], end: int) -> list[Stay]:
    """The stays, each with those that follow it made one."""
    follows = {gap.earlier: gap.later for gap in taken if gap.later > gap.earlier}
    wraps = {gap.earlier: gap.later for gap in taken if gap.later <= gap.earlier}
    joined: list[Stay] = []
    swallowed = set(follows.values())
    from_before = {first: stays[last].leave for last, first in wraps.items()}
    for index, stay in enumerate(stays):
        if index in swallowed:
            continue
        if index not in follows and index not in from_before and index not in wraps:
            joined.append(stay)
            continue
        last = index
        while last in follows:
            last = follows[last]
        found = stay._replace(stop=stays[last].stop, leave=stays[last].leave, free=stays[last].free)
        if stay.value.kind is Kind.GRADIENT and last != index:
            found = found._replace(stop=end, free=(Tier.DEVICE,))
        if index in from_before and last in wraps:
            found = Stay(stay.value, stay.nbytes, 0, end)
        elif index in from_before:
            found = found._replace(start=0, arrive=(), leave=from_before[index], free=())
        elif last in wraps:
            found = found._replace(stop=end, leave=(), free=(found.leave[-1],))
        joined.append(found)
    return joined
