"""A chain cut into units for the `rotor` recurrences: single stages, or in long chains runs of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from tapestream.costs import Profile, StageCost
from tapestream.planners._fit import plain


@dataclass(frozen=True, slots=True)
class Run:
    """Some successive stages: their costs, and bytes of the states and cotangents around them (one more each)."""

    states: tuple[int, ...]
    cotangents: tuple[int, ...]
    costs: Sequence[StageCost]

    @classmethod
    def of(cls, profile: Profile) -> "tuple[Run, int]":
        """The whole chain, and bytes held all the time.

        Each state counts with the carried storages that pass through it, except those that pass through all states:
        they are held all the time.
        """
        n = len(profile)
        states = [profile.state_nbytes(k) for k in range(n + 1)]
        always = profile.outside_nbytes
        for shared in profile.carried:
            first, last = max(shared.first, 0), min(shared.last, n)
            if last - first == n:
                always += shared.nbytes
                continue
            for k in range(first, last + 1):
                states[k] += shared.nbytes
        cotangents = tuple(profile.cotangent_nbytes(k) for k in range(n + 1))
        stages = plain(profile).stages
        return cls(tuple(states), cotangents, stages), always

    def __len__(self) -> int:
        return len(self.costs)

    def cut(self, start: int, stop: int) -> "Run":
        """Stages start .. stop-1 of this run."""
        return Run(self.states[start : stop + 1], self.cotangents[start : stop + 1], self.costs[start:stop])

    def reads_output(self) -> bool:
        """Whether the backward of some stage reads its output."""
        return any(cost.reads_output for cost in dict.fromkeys(self.costs))

    def grain(self) -> int:
        """The largest number of bytes that divides every size in the run (at least 1)."""
        found = gcd(*self.states, *self.cotangents)
        for cost in dict.fromkeys(self.costs):
            found = gcd(found, cost.saved_nbytes, cost.forward_extra_nbytes, cost.backward_extra_nbytes)
            found = gcd(found, cost.recorded_extra_nbytes, cost.gradient_nbytes)
        return found or 1


@dataclass(frozen=True, slots=True)
class Unit:
    """What the recurrences know of stages first .. stop-1, all recorded or all passed by forward.

    Bytes never contain the state before the unit, unless said, nor the cotangent after it where forwards run:
    ``forward_nbytes``: peak of passing forward (``forward_through_nbytes``: with the state before it, being live only);
    ``record_nbytes`` / ``record_through_nbytes``: the same when recording;
    ``saved_nbytes``: held once recorded, the state after the unit included where its last stage reads it;
    ``backward_nbytes``: peak from the end of the recording on, cotangents and gradients made included;
    ``gradient_nbytes``: gradients that the unit leaves behind.
    """

    first: int
    stop: int
    input_nbytes: int
    cotangent_nbytes: int
    forward_nbytes: int
    forward_through_nbytes: int
    record_nbytes: int
    record_through_nbytes: int
    saved_nbytes: int
    backward_nbytes: int
    gradient_nbytes: int
    reads_input: bool
    reads_output: bool
    forward_seconds: float
    seconds: float
    inner: "Units | None" = None

    def tape_nbytes(self, held: int) -> int:
        """Bytes that recording the unit takes until its backward; the state before it is not counted where ``held``."""
        return self.saved_nbytes + (self.input_nbytes if self.reads_input and not held else 0)

    def recording_nbytes(self, held: int, waiting_nbytes: int, done_nbytes: int) -> int:
        """The peak of recording (beside what waits: a cotangent and gradients made before) and of backward (beside the
        gradients of all units after this one)."""
        if held or self.reads_input:
            record = self.record_nbytes + (0 if held else self.input_nbytes)
        else:
            record = self.record_through_nbytes
        backward = self.backward_nbytes + (self.input_nbytes if self.reads_input and not held else 0)
        return max(record + waiting_nbytes, backward + done_nbytes)


@dataclass(frozen=True, slots=True)
class Units:
    """A run as units; ``reads_output`` where some stage of the whole chain reads its output in backward."""

    units: tuple[Unit, ...]
    reads_output: bool


def unit_of(run: Run, first: int, inner: Units | None = None) -> Unit:
    """The unit of a run whose first stage has number ``first``."""
    states, cotangents, costs = run.states, run.cotangents, run.costs
    saved = held = 0  # bytes of saved tensors, and of states that the tape holds, strictly inside the run
    forward, through, backward, record_first, record_rest = [], [], [0], 0, 0
    gradients = sum(cost.gradient_nbytes for cost in costs)
    made = gradients  # by the backwards of stages k and later
    for k, cost in enumerate(costs):
        output = states[k + 1] + cost.forward_extra_nbytes
        before = 0 if k == 0 else states[k]
        forward.append(before + output)
        through.append(states[k] + output)
        kept = cost.saved_nbytes + states[k + 1] + cost.recorded_extra_nbytes
        recording = saved + held + before + kept
        record_first, record_rest = (recording, 0) if k == 0 else (record_first, max(record_rest, recording))
        saved += cost.saved_nbytes
        if k and (cost.reads_input or costs[k - 1].reads_output):
            held += states[k]
        consumed = (cost.reads_output and states[k + 1]) + cost.backward_extra_nbytes
        backward.append(saved + held + consumed + cotangents[k] + cotangents[k + 1] + made)
        made -= cost.gradient_nbytes
    return Unit(
        first=first,
        stop=first + len(run),
        input_nbytes=states[0],
        cotangent_nbytes=cotangents[-1],
        forward_nbytes=max(forward),
        forward_through_nbytes=max(through),
        record_nbytes=max(record_first, record_rest),
        record_through_nbytes=max(record_first + states[0], record_rest),
        saved_nbytes=saved + held + (states[-1] if costs[-1].reads_output else 0),
        backward_nbytes=max(backward),
        gradient_nbytes=gradients,
        reads_input=costs[0].reads_input,
        reads_output=costs[-1].reads_output,
        forward_seconds=sum(cost.forward_seconds for cost in costs),
        seconds=sum(cost.recorded_seconds + cost.backward_seconds for cost in costs),
        inner=inner,
    )


def turn_unit(run: Run, turn_nbytes: int) -> Unit:
    """The turn from forward to backward as a last unit without stages: "recording" it makes the last cotangent.

    So the turn may come after a sweep that records nothing, where its own bytes leave no room for a tape.
    """
    made = run.cotangents[-1] + turn_nbytes
    n, state = len(run), run.states[-1]
    return Unit(n, n, state, 0, 0, 0, made, state + made, 0, 0, 0, False, False, 0.0, 0.0)


def arrange(run: Run, turn_nbytes: int, width: int, inner_width: int) -> Units:
    """The whole chain in units: stage by stage up to ``width`` stages, else ``width`` runs of about equal length.

    The last of them is cut into smaller and smaller units towards the turn, since what is recorded there is never
    recomputed. What is inside a run is cut in the same way into at most ``inner_width`` units.
    """
    points = even_points(run.states, width)
    while points[-1] - points[-2] > 1:
        start = points[-2]
        points[-1:] = [start + point for point in even_points(run.states[start:], inner_width)[1:]]
    reads = run.reads_output()
    units = _units(run, points, inner_width, reads)
    return Units((*units, turn_unit(run, turn_nbytes)), reads)


def _units(run: Run, points: list[int], inner_width: int, reads_output: bool) -> tuple[Unit, ...]:
    """A run cut at ``points``; equal units share what is inside them."""
    known: dict[Run, Units] = {}
    units = []
    for start, stop in pairwise(points):
        part = run.cut(start, stop)
        if stop - start > 1 and part not in known:
            # Depth of this call is the number of levels, a logarithm of the number of stages.
            inside = _units(part, even_points(part.states, inner_width), inner_width, reads_output)
            known[part] = Units(inside, reads_output)
        units.append(unit_of(part, start, known.get(part)))
    return tuple(units)


def even_points(states: tuple[int, ...], parts: int) -> list[int]:
    """Ends of single stages, or of ``parts`` runs of about equal length, each end moved a little to the smallest state
    nearby."""
    n = len(states) - 1
    if n <= parts:
        return list(range(n + 1))
    slack = n // parts // 4
    points = [0]
    for i in range(1, parts):
        even = i * n // parts
        nearby = ((states[k], abs(k - even), k) for k in range(even - slack, even + slack + 1))
        points.append(min(nearby)[2])
    return [*points, n]
