"""The tables of `rotor`: least seconds for each number of memory steps, and least bytes.

A problem (held, a, b) treats units a .. b, the state before unit a being live. ``held`` is 1 where the tape holds that
state anyway, its bytes counted by others, and 0 where they count here and end as soon as possible. Either unit a is
recorded and (a+1, b) solved in what is left, or the state is kept, the chain runs forward to a unit j, (j, b) is solved
beside the kept state, then (a, j-1). The published recurrence has every input held; the distinction is ours, and so
are the gradients that stay: when a problem is begun those of all units after b are there, so its bytes count them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tapestream.planners._units import Unit, Units

Floats: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scale:
    """``steps / nbytes`` memory steps per byte; ``capacity`` steps in all."""

    steps: int
    nbytes: int
    capacity: int

    @classmethod
    def of(cls, nbytes: int, steps: int, grain: int) -> "Scale":
        """``steps`` for ``nbytes``, or one per ``grain`` bytes where that is not more: then nothing is rounded."""
        if nbytes // grain <= steps:
            return cls(1, grain, nbytes // grain)
        return cls(steps, nbytes, steps)

    def up(self, nbytes: int) -> int:
        """Steps that hold ``nbytes``."""
        return -(-nbytes * self.steps // self.nbytes)


class Choice(NamedTuple):
    """What to do with a problem: record its first unit (``cut`` 0) or run forward by ``cut`` units.

    ``rest``: memory of the problem that follows (the rest of the units, the right part, or a unit's inside), in steps.
    """

    cut: int
    rest: int


class Solution(Protocol):
    """A solved chain, from which the schedule is built."""

    @property
    def chain(self) -> Units: ...
    def inside(self, inner: Units) -> "Solution": ...
    def choose(self, held: int, a: int, b: int, memory: int) -> Choice: ...


class _Tables:
    """What both tables share: the inner solutions, and the forward sweeps from each unit on."""

    def __init__(self, chain: Units, *args: Any) -> None:
        self.chain = chain
        inners = {id(unit.inner): unit.inner for unit in chain.units if unit.inner}
        # One level of groups deeper each time: as many levels as the logarithm of the number of stages.
        self._inside = {key: type(self)(inner, *args) for key, inner in inners.items()}
        units = chain.units
        # [b]: bytes of the gradients made by units after b
        self._done = [sum(after.gradient_nbytes for after in units[b + 1 :]) for b in range(len(units))]
        self._alike = _alike(units)
        self._ahead: list[Floats] = []  # [a][i]: seconds from unit a forward to a+1+i
        self._peaks: list[Bytes] = []  # [a][i]: bytes at the peak on that way
        for a, unit in enumerate(units):
            self._ahead.append(np.cumsum([after.forward_seconds for after in units[a:]]))
            way = [unit.forward_nbytes, *(after.forward_through_nbytes for after in units[a + 1 :])]
            self._peaks.append(np.maximum.accumulate(np.array(way, dtype=np.int64)))

    def ahead(self, a: int) -> tuple[Floats, Bytes]:
        """Seconds from unit ``a`` forward to each one after it, the end included, and bytes at the peak on that way."""
        return self._ahead[a], self._peaks[a]

    def inside(self, inner: Units) -> Self:
        """The solution of a unit's inside."""
        found = self._inside[id(inner)]
        assert isinstance(found, type(self))
        return found

    def _shape(self) -> tuple[int, int, int]:
        n = len(self.chain.units)
        return (2 if self.chain.reads_output else 1), n, n

    def _same(self, held: int, a: int, b: int) -> tuple[int, int, int] | None:
        """A problem solved before that has the same solution: one unit later, where all units are alike."""
        if b + 1 < a + self._alike[a] and (not held or self.chain.units[a].reads_output):
            return held, a + 1, b + 1
        return None

    def _problems(self) -> Iterator[tuple[int, int, int]]:
        """Every problem after those that it is made of."""
        units = self.chain.units
        for a in reversed(range(len(units))):
            for b in range(a, len(units)):
                yield 0, a, b
                if self.chain.reads_output and (a == 0 or units[a - 1].reads_output):
                    yield 1, a, b


class Fastest(_Tables):
    """opt(held, a, b, m): least seconds with m memory steps; infinite where they do not suffice."""

    def __init__(self, chain: Units, scale: Scale) -> None:
        super().__init__(chain, scale)
        self._scale = scale
        self._seconds = np.full((*self._shape(), scale.capacity + 1), np.inf)
        self._steps = np.arange(scale.capacity + 1)
        rows = np.empty((len(chain.units), scale.capacity + 1))
        for problem in self._problems():
            same = self._same(*problem)
            if same is not None:
                self._seconds[problem] = self._seconds[same]
            else:
                self._options(*problem, rows).min(axis=0, out=self._seconds[problem])

    @property
    def seconds(self) -> float:
        """Seconds of the whole chain with all memory."""
        return self.seconds_with(self._scale.capacity)

    def seconds_with(self, memory: int) -> float:
        """Seconds of the whole chain with so many steps."""
        return float(self._seconds[0, 0, -1, memory])

    def reversing(self, held: int, a: int) -> Floats:
        """Seconds of the problems (held, a, b) for all b, a row each, for each memory."""
        return self._seconds[held, a, a:]

    def choose(self, held: int, a: int, b: int, memory: int) -> Choice:
        """The option of least seconds."""
        rows = np.empty((b - a + 1, self._scale.capacity + 1))
        cut = int(self._options(held, a, b, rows)[:, memory].argmin())
        unit = self.chain.units[a]
        if a == b and unit.inner:
            taken = self._done[b]
        else:
            taken = (0 if held else unit.input_nbytes) if cut else unit.tape_nbytes(held)
        return Choice(cut, memory - self._scale.up(taken))

    def _options(self, held: int, a: int, b: int, rows: Floats) -> Floats:
        """Seconds of each option (rows: record, then cuts 1 .. b-a) for each memory (columns), in ``rows``."""
        unit, last, up = self.chain.units[a], self._scale.capacity, self._scale.up
        options = rows[: b - a + 1]
        options[0] = np.inf
        if a == b and unit.inner:
            beside = up(self._done[b])
            options[0, beside:] = self.inside(unit.inner)._seconds[held, 0, -1, : max(0, last + 1 - beside)]
            return options
        waiting = self.chain.units[b].cotangent_nbytes + self._done[b]
        tape = up(unit.tape_nbytes(held))
        low = max(tape, up(unit.recording_nbytes(held, waiting, self._done[a])))
        if low <= last:
            rest = self._seconds[int(unit.reads_output), a + 1, b] if a < b else np.zeros(last + 1)
            np.add(rest[low - tape : last + 1 - tape], unit.seconds, out=options[0, low:])
        if a == b:
            return options
        kept = 0 if held else unit.input_nbytes
        first = min(up(kept), last + 1)
        need = -(-(self._peaks[a][: b - a] + (waiting + kept)) * self._scale.steps // self._scale.nbytes)
        options[1:, :first] = np.inf
        cuts = options[1:, first:]
        np.add(self._seconds[0, a + 1 : b + 1, b, : last + 1 - first], self._seconds[held, a, a:b, first:], out=cuts)
        cuts += self._ahead[a][: b - a, None]
        few = max(0, min(int(need[-1]), last + 1) - first)  # columns in which the way ahead may not fit: it only grows
        np.copyto(cuts[:, :few], np.inf, where=self._steps[first : first + few] < need[:, None])
        return options


class Leanest(_Tables):
    """Least bytes of each problem (exact), and among those of least bytes the least seconds found."""

    def __init__(self, chain: Units) -> None:
        super().__init__(chain)
        self._nbytes = np.zeros(self._shape(), dtype=np.int64)
        self._seconds = np.zeros(self._shape())
        for problem in self._problems():
            same = self._same(*problem)
            if same is not None:
                self._nbytes[problem], self._seconds[problem] = self._nbytes[same], self._seconds[same]
                continue
            nbytes, seconds = self._options(*problem)
            best = _least(nbytes, seconds)
            self._nbytes[problem], self._seconds[problem] = nbytes[best], seconds[best]

    @property
    def seconds(self) -> float:
        """Seconds of the whole chain."""
        return float(self._seconds[0, 0, -1])

    def reversing(self, held: int, a: int) -> tuple[Bytes, Floats]:
        """Bytes and seconds of the problems (held, a, b) for all b."""
        return self._nbytes[held, a, a:], self._seconds[held, a, a:]

    def choose(self, held: int, a: int, b: int, memory: int) -> Choice:
        """The option of least bytes."""
        return Choice(_least(*self._options(held, a, b)), 0)

    def _options(self, held: int, a: int, b: int) -> tuple[Bytes, Floats]:
        """Bytes and seconds of each option: record, then cuts 1 .. b-a."""
        unit = self.chain.units[a]
        nbytes, seconds = np.zeros(b - a + 1, dtype=np.int64), np.zeros(b - a + 1)
        if a == b and unit.inner:
            inside = self.inside(unit.inner)
            nbytes[0], seconds[0] = inside._nbytes[held, 0, -1] + self._done[b], inside._seconds[held, 0, -1]
            return nbytes, seconds
        waiting = self.chain.units[b].cotangent_nbytes + self._done[b]
        nbytes[0], seconds[0] = unit.recording_nbytes(held, waiting, self._done[a]), unit.seconds
        if a < b:
            rest = int(unit.reads_output), a + 1, b
            nbytes[0] = max(nbytes[0], unit.tape_nbytes(held) + self._nbytes[rest])
            seconds[0] += self._seconds[rest]
            right, left = (0, slice(a + 1, b + 1), b), (held, a, slice(a, b))
            beside = np.maximum(self._peaks[a][: b - a] + waiting, self._nbytes[right])
            nbytes[1:] = np.maximum(beside + (0 if held else unit.input_nbytes), self._nbytes[left])
            seconds[1:] = self._ahead[a][: b - a] + self._seconds[right] + self._seconds[left]
        return nbytes, seconds


def _alike(units: Sequence[Unit]) -> list[int]:
    """[a]: how many units from ``a`` on differ in nothing but their place, and leave no gradients behind."""
    bare = [replace(unit, first=0, stop=unit.stop - unit.first) for unit in units]
    found = [1] * len(units)
    for a in reversed(range(len(units) - 1)):
        if bare[a] == bare[a + 1] and not units[a].gradient_nbytes:
            found[a] += found[a + 1]
    return found


def _least(nbytes: Bytes, seconds: Floats) -> int:
    return int(np.lexsort((seconds, nbytes))[0])
