"""Keeping values on the device between their uses: within a phase, into the step phase, into the next step.

What is there when a phase ends lives there as far as users can see, so it is not assumed to be at home unchanged: it
must be updated and written afterwards anyway. That is so for parameters, gradients and optimizer state that the
schedule updates, and for nothing else.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapestream.ir import Action, Kind, Tier, Value
from tapestream.passes.issue import BARRIERS
from tapestream.passes.memory import Footprint, Nbytes
from tapestream.passes.stays import Occupancy, Stay, successors

_ROUNDS = 8
_STEEP = 6  # the price of room at an action is how full it is, to this power


@dataclass(frozen=True, slots=True)
class _Gap:
    """Where a value of ``nbytes`` is not needed: after stay ``earlier`` and before ``later``, its first stay where the
    gap leads into the next step. Keeping it spares ``saves`` copies a step."""

    earlier: int
    later: int
    nbytes: int
    spans: tuple[tuple[int, int], ...]
    saves: int = 1


@dataclass(frozen=True, slots=True)
class _Choice:
    """Gaps to keep together; that spares ``more`` copies beyond those of each."""

    gaps: tuple[_Gap, ...]
    more: int = 0

    def price(self, prices: Mapping[_Gap, float]) -> float:
        """Price of room for each copy spared."""
        return sum(prices[gap] for gap in self.gaps) / (sum(gap.saves for gap in self.gaps) + self.more)


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
    choices = list(_choices(computation, stays, across))
    gaps = {gap for choice in choices for gap in choice.gaps}
    empty = Occupancy(base, stays).nbytes
    allowed = int(empty.max()) + sum(stay.nbytes for stay in stays) if allowed_nbytes is None else allowed_nbytes
    price = np.ones(len(computation))
    best: tuple[int, set[_Gap]] = (0, set())
    before: set[_Gap] | None = None
    for _ in range(_ROUNDS):
        total = np.concatenate([[0.0], np.cumsum(price)])
        prices = {gap: float(sum(total[stop] - total[start] for start, stop in gap.spans)) for gap in gaps}
        held, taken = empty.copy(), set[_Gap]()
        for choice in sorted(choices, key=lambda choice: choice.price(prices)):
            _take(choice, held, taken, allowed)
        best = max(best, (_spared(choices, taken), taken), key=lambda found: found[0])
        if len(taken) == len(gaps) or taken == before:  # nothing is left to take, or prices lead here again
            break
        before = taken
        price = (held / max(1, allowed)) ** _STEEP
    return _joined(stays, best[1], len(computation) - 1)


def _take(choice: _Choice, held: Nbytes, taken: set[_Gap], allowed: int) -> None:
    """Keep what is left of a choice if there is room."""
    left = [gap for gap in choice.gaps if gap not in taken]
    spans = [(slice(*span), gap.nbytes) for gap in left for span in gap.spans]
    if all(held[span].max(initial=0) + nbytes <= allowed for span, nbytes in spans):
        taken.update(left)
        for span, nbytes in spans:
            held[span] += nbytes


def _spared(choices: Sequence[_Choice], taken: set[_Gap]) -> int:
    """Bytes that need not move."""
    whole = sum(
        choice.more * choice.gaps[0].nbytes for choice in choices if choice.more and taken.issuperset(choice.gaps)
    )
    return whole + sum(gap.saves * gap.nbytes for gap in taken)


def _choices(computation: Sequence[Action], stays: Sequence[Stay], across: bool) -> Iterator[_Choice]:
    """Single gaps, and for values that may stay throughout all of theirs."""
    phase = np.cumsum([action in BARRIERS for action in computation])
    end = len(computation)
    visits: defaultdict[Value, list[int]] = defaultdict(list)
    inner: defaultdict[Value, list[_Gap]] = defaultdict(list)
    for i, stay in enumerate(stays):
        visits[stay.value].append(i)
    for earlier, later in successors(stays):
        here, there = stays[earlier], stays[later]
        together, spans = phase[here.stop] == phase[there.start], ((here.stop + 1, there.start),)
        if here.value.kind is Kind.GRADIENT:
            if across and here.leave and not together and not there.leave:  # users see it until the step has ended
                yield _Choice((_Gap(earlier, later, here.nbytes, (*spans, (there.stop + 1, end)), 2),))
        elif here.free == (Tier.DEVICE,) and there.arrive and (together or (across and there.leave)):
            inner[here.value].append(_Gap(earlier, later, here.nbytes, spans))
            yield _Choice((inner[here.value][-1],))
    for value, indices in visits.items() if across else ():
        first, last = indices[0], indices[-1]
        if value.kind is not Kind.GRADIENT and stays[first].arrive and len(inner[value]) == len(indices) - 1:
            around = _Gap(last, first, stays[first].nbytes, ((0, stays[first].start), (stays[last].stop + 1, end)))
            written = bool(stays[last].leave)
            if written and first != last and value.kind is Kind.PARAMETERS:
                yield _Choice((around,))
            yield _Choice((*inner[value], around), more=int(written))


def _joined(stays: Sequence[Stay], taken: set[_Gap], end: int) -> list[Stay]:
    """The stays, each with those that follow it made one."""
    follows = {gap.earlier: gap.later for gap in taken if gap.later > gap.earlier}
    wraps = {gap.earlier: gap.later for gap in taken if gap.later <= gap.earlier}
    joined: list[Stay] = []
    swallowed = set(follows.values())
    from_before = {first: stays[last].leave for last, first in wraps.items()}
    for index, stay in enumerate(stays):
        if index in swallowed:
            continue
        last = index
        while last in follows:
            last = follows[last]
        found = replace(stay, stop=stays[last].stop, leave=stays[last].leave, free=stays[last].free)
        if stay.value.kind is Kind.GRADIENT and last != index:
            found = replace(found, stop=end, free=(Tier.DEVICE,))
        if index in from_before and last in wraps:
            found = Stay(stay.value, stay.nbytes, 0, end)
        elif index in from_before:
            found = replace(found, start=0, arrive=(), leave=from_before[index], free=())
        elif last in wraps:
            found = replace(found, stop=end, leave=(), free=(found.leave[-1],))
        joined.append(found)
    return joined
