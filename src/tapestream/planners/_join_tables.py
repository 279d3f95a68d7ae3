"""The tables of `join`: several chains at once, the outermost piece of one of them first.

A place says how far each branch is: at unit f_i, and whether the tape holds its state there (``held``). What is left of
it is kept or recorded already and used up after all that is right of it, so it only takes memory. From a place one
branch goes on: its unit is recorded, or its state is kept and the branch runs forward to a later unit, to be recomputed
and reversed by `rotor`'s recurrence when everything further right is done. With one branch this is that recurrence.

While a branch runs forward, the others wait at their places with a state each; while it is reversed, with a cotangent
each and the gradients that they have made.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from tapestream.costs import Profile
from tapestream.planners._rotor_tables import Bytes, Fastest, Floats, Leanest, Scale
from tapestream.planners._units import Run, Units, arrange

Index = tuple[int, ...]


class Place(NamedTuple):
    """How far each branch is."""

    held: Index
    at: Index

    def moved(self, branch: int, to: int, held: int) -> "Place":
        """``branch`` at another unit."""
        i = branch
        return Place((*self.held[:i], held, *self.held[i + 1 :]), (*self.at[:i], to, *self.at[i + 1 :]))


class Step(NamedTuple):
    """``branch`` records its unit (``cut`` 0), or keeps its state and runs forward by ``cut`` units, which are reversed
    in ``memory`` steps."""

    place: Place
    branch: int
    cut: int
    memory: int


class Branches:
    """Chains in units, and what each waits with at each of its units (its end included).

    ``in_order``: a branch goes on only when those before it are at their ends. ``always``: bytes held all the time.
    """

    def __init__(self, profile: Profile, most: int, *, in_order: bool) -> None:
        found = [Run.of(branch) for branch in profile.branches]
        runs = [run for run, _ in found]
        self.turn_nbytes, self.in_order = profile.turn_nbytes, in_order
        self.always = profile.outside_nbytes + sum(nbytes for _, nbytes in found)
        self.grain = gcd(profile.turn_nbytes, *(run.grain() for run in runs))
        self.chains = [_units(run, width) for run, width in zip(runs, _widths(runs, most, in_order), strict=True)]
        self.lengths = tuple(len(chain.units) for chain in self.chains)
        points = [
            [*(unit.first for unit in chain.units), len(run)] for run, chain in zip(runs, self.chains, strict=True)
        ]
        self.states = [[run.states[k] for k in some] for run, some in zip(runs, points, strict=True)]
        self.cotangents = [[run.cotangents[k] for k in some] for run, some in zip(runs, points, strict=True)]
        self.gradients = [
            [sum(unit.gradient_nbytes for unit in chain.units[k:]) for k in range(len(chain.units) + 1)]
            for chain in self.chains
        ]

    @property
    def start(self) -> Place:
        """Every branch at its input."""
        return Place((0,) * len(self.chains), (0,) * len(self.chains))

    def shape(self) -> Index:
        """Of a table of all places."""
        return (*(1 + chain.reads_output for chain in self.chains), *(n + 1 for n in self.lengths))

    def places(self) -> Iterator[Place]:
        """Every place after those that it may lead to."""
        for at in product(*(range(n, -1, -1) for n in self.lengths)):
            if self.in_order and any(
                f < n and any(at[i + 1 :]) for i, (f, n) in enumerate(zip(at, self.lengths, strict=True))
            ):
                continue
            sides = [
                (0, 1) if f and chain.units[f - 1].reads_output else (0,)
                for f, chain in zip(at, self.chains, strict=True)
            ]
            for held in product(*sides):
                yield Place(held, at)

    def going(self, place: Place) -> Iterator[int]:
        """Branches that may go on."""
        for i, (f, n) in enumerate(zip(place.at, self.lengths, strict=True)):
            if f < n:
                yield i
                if self.in_order:
                    return

    def turn(self, place: Place) -> int:
        """Bytes at the turn: all last states and their cotangents."""
        return self.turn_nbytes + self.live(place, -1) + sum(of[-1] for of in self.cotangents)

    def live(self, place: Place, branch: int) -> int:
        """Bytes of the states with which the other branches wait while ``branch`` runs forward."""
        waiting = zip(self.states, place.at, place.held, strict=True)
        return sum(of[f] for i, (of, f, held) in enumerate(waiting) if i != branch and not held)

    def done(self, place: Place, branch: int) -> int:
        """Bytes with which the others wait while ``branch`` is reversed: cotangents and gradients."""
        waiting = zip(self.cotangents, self.gradients, place.at, strict=True)
        return sum(of[f] + made[f] for i, (of, made, f) in enumerate(waiting) if i != branch)

    def recording(self, place: Place, i: int) -> int:
        """Bytes at the peak of recording and of reversing the next unit of branch ``i``."""
        f = place.at[i]
        made = self.gradients[i][f + 1] + self.done(place, i)
        return self.chains[i].units[f].recording_nbytes(place.held[i], self.live(place, i), made)

    def tape(self, place: Place, i: int) -> int:
        """Bytes that this recording leaves."""
        return self.chains[i].units[place.at[i]].tape_nbytes(place.held[i])

    def kept(self, place: Place, i: int) -> int:
        """Bytes of the state of branch ``i`` where it is kept."""
        return 0 if place.held[i] else self.states[i][place.at[i]]

    def ahead(self, place: Place, i: int) -> tuple[int | slice, ...]:
        """Where in a table the places are to which branch ``i`` may run forward."""
        held, (*at,) = place.moved(i, 0, 0)
        return (*held, *at[:i], slice(place.at[i] + 1, None), *at[i + 1 :])

    def recorded(self, place: Place, i: int) -> Place:
        """Where a recording leads to."""
        return place.moved(i, place.at[i] + 1, int(self.chains[i].units[place.at[i]].reads_output))


def _units(run: Run, width: int) -> Units:
    """A branch in at most about ``width`` units."""
    found = arrange(run, 0, width, 24)
    return Units(found.units[:-1], found.reads_output)  # without the turn, which all branches share


def _widths(runs: Sequence[Run], most: int, in_order: bool) -> list[int]:
    """Units of each branch, so that the places are at most about ``most``; a short one leaves theirs to the others."""
    if in_order:
        share = max(1, most // len(runs))
        return [share] * len(runs)
    widths = [len(run) for run in runs]
    while prod(width + 1 for width in widths) > most and max(widths) > 1:
        widest = widths.index(max(widths))
        widths[widest] -= max(1, widths[widest] // 16)
    return widths


class FastestJoin:
    """Least seconds from each place with m memory steps; infinite where they do not suffice."""

    def __init__(self, branches: Branches, scale: Scale) -> None:
        self.branches, self.scale = branches, scale
        self.solutions = [Fastest(chain, scale) for chain in branches.chains]
        self._seconds: Floats = np.full((*branches.shape(), scale.capacity + 1), np.inf)
        for place in branches.places():
            row = self._seconds[(*place.held, *place.at)]
            if place.at == branches.lengths:
                row[scale.up(branches.turn(place)) :] = 0.0
            for i in branches.going(place):
                np.minimum(row, self._options(place, i).min(axis=0), out=row)

    def levels(self) -> Iterator[tuple[float, int]]:
        """What more and more memory brings: seconds of the whole, and the least memory steps for them."""
        start = self.branches.start
        before = np.inf
        for memory, seconds in enumerate(self._seconds[(*start.held, *start.at)].tolist()):
            if seconds < before:
                yield seconds, memory
                before = seconds

    def path(self, memory: int) -> Iterator[Step]:
        """The steps from the start with ``memory`` steps; there must be a way."""
        place, branches, up = self.branches.start, self.branches, self.scale.up
        while place.at != branches.lengths:
            options = {i: self._options(place, i)[:, memory] for i in branches.going(place)}
            i = min(options, key=lambda branch: (options[branch].min(), -branch))
            cut = int(options[i].argmin())
            yield Step(place, i, cut, memory - up(branches.done(place, i)))
            memory -= up(branches.kept(place, i) if cut else branches.tape(place, i))
            place = place.moved(i, place.at[i] + cut, 0) if cut else branches.recorded(place, i)

    def _options(self, place: Place, i: int) -> Floats:
        """Seconds of each option of branch ``i`` (rows: record, then cuts 1, 2, ..) for each memory (columns)."""
        branches, solution, last, up = self.branches, self.solutions[i], self.scale.capacity, self.scale.up
        f, n = place.at[i], branches.lengths[i]
        options = np.full((n - f + 1, last + 1), np.inf)
        tape = up(branches.tape(place, i))
        low = max(tape, up(branches.recording(place, i)))
        if low <= last:
            after = branches.recorded(place, i)
            rest = self._seconds[(*after.held, *after.at)]
            np.add(rest[low - tape : last + 1 - tape], solution.chain.units[f].seconds, out=options[0, low:])
        kept, beside = up(branches.kept(place, i)), up(branches.done(place, i))
        low = max(kept, beside)
        if low > last:
            return options
        right = self._seconds[branches.ahead(place, i)]
        left = solution.reversing(place.held[i], f)
        seconds, peaks = solution.ahead(f)
        cuts = options[1:, low:]
        np.add(right[:, low - kept : last + 1 - kept], left[:, low - beside : last + 1 - beside], out=cuts)
        cuts += seconds[:, None]
        around = branches.live(place, i) + branches.kept(place, i)
        need = np.array([up(nbytes + around) for nbytes in peaks.tolist()])
        np.copyto(cuts, np.inf, where=np.arange(low, last + 1) < need[:, None])
        return options


class LeanestJoin:
    """Least bytes from each place (exact), and among those of least bytes the least seconds found."""

    def __init__(self, branches: Branches) -> None:
        self.branches = branches
        self.solutions = [Leanest(chain) for chain in branches.chains]
        self._nbytes: Bytes = np.zeros(branches.shape(), dtype=np.int64)
        self._seconds: Floats = np.zeros(branches.shape())
        for place in branches.places():
            here = (*place.held, *place.at)
            if place.at == branches.lengths:
                self._nbytes[here] = branches.turn(place)
            else:
                self._nbytes[here], self._seconds[here], _, _ = self._best(place)

    @property
    def seconds(self) -> float:
        """Seconds of the whole."""
        return float(self._seconds[(*self.branches.start.held, *self.branches.start.at)])

    def path(self) -> Iterator[Step]:
        """The steps from the start."""
        place, branches = self.branches.start, self.branches
        while place.at != branches.lengths:
            _, _, i, cut = self._best(place)
            yield Step(place, i, cut, 0)
            place = place.moved(i, place.at[i] + cut, 0) if cut else branches.recorded(place, i)

    def _best(self, place: Place) -> tuple[int, float, int, int]:
        return min(option for i in self.branches.going(place) for option in self._options(place, i))

    def _options(self, place: Place, i: int) -> Iterator[tuple[int, float, int, int]]:
        """Bytes and seconds of each option, with the branch and the cut."""
        branches, solution = self.branches, self.solutions[i]
        f = place.at[i]
        after = branches.recorded(place, i)
        rest = (*after.held, *after.at)
        nbytes = max(branches.recording(place, i), branches.tape(place, i) + int(self._nbytes[rest]))
        yield nbytes, solution.chain.units[f].seconds + float(self._seconds[rest]), i, 0
        right = branches.ahead(place, i)
        forward, way = solution.ahead(f)
        left, again = solution.reversing(place.held[i], f)
        sweep = np.maximum(way + branches.live(place, i), self._nbytes[right]) + branches.kept(place, i)
        peaks = np.maximum(sweep, left + branches.done(place, i))
        seconds = forward + self._seconds[right] + again
        for cut, pair in enumerate(zip(peaks.tolist(), seconds.tolist(), strict=True), 1):
            yield *pair, i, cut
