"""Length unknown while running: Stumm & Walther 2010 (algorithms I and II); Wang, Moin & Iaccarino 2009.

A forward step is told to an `Online`, which says what to keep and what to give up; when the run has ended, it reverses
it. All forwards are made before the end is known, so n + sum of P(gap, slots left) forwards come on top of the records.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import inf
from types import MappingProxyType
from typing import Literal, TypeAlias

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import Action, Forward, Keep, Node, Phase, PhaseKind, Restore, Schedule, Series, Shift
from tapestream.planners._fit import by_seconds, first_fit, positive
from tapestream.planners._recurrences import Part, Twins, binomial_cut, counts, freed, least_forwards, reach, reversal

NAME = "online"
Rule: TypeAlias = Literal["stumm_walther_1", "stumm_walther_2", "wang_moin"]


class Online:
    """Restart checkpoints of a run of unknown length; ``slots`` counts that of state 0, which always stays.

    Rules: "wang_moin", the published one with levels: a restart checkpoint with a later one of higher level is
    dispensable; where there is none, the newest gives way and the new one stands a level higher. "stumm_walther_1" and
    "stumm_walther_2" are reconstructions (ours) with the published aims, forwards that are least up to C(slots + 2, 2)
    steps, and close to it up to C(slots + 3, 3): the first gives up the newest one that leaves a gap which its slots
    reach with t repetitions, t growing when there is none; the second the one whose loss costs least, if keeping the
    live state makes up for that. Against the least sum over all positions the second needs 5% more forwards at most
    where this was tried (slots 2..6, up to C(slots + 3, 3) steps), the first 11%, "wang_moin" 21%. Beyond that all
    go on without limit. A step takes O(slots). Raises InputError for slots below 1 and unknown rules.
    """

    def __init__(self, slots: int, rule: Rule = "stumm_walther_2") -> None:
        self.slots = positive(NAME, "slots", slots, slots)
        if rule not in RULES:
            raise InputError(f"{NAME}: rule is one of {', '.join(RULES)}, not {rule!r}")
        self.rule = rule
        self.steps = 0
        self._kept: list[int] = []
        self._victim = RULES[rule](self.slots)

    @property
    def kept(self) -> tuple[int, ...]:
        """States kept now, the first being 0 once a step has been made."""
        return tuple(self._kept)

    def advance(self) -> tuple[Action, ...]:
        """What to do for one more step: give up a restart checkpoint, keep the live state, run forward."""
        live, kept = self.steps, self._kept
        self.steps += 1
        forward = Forward(live, live + 1)
        victim = self._victim(kept, live)
        if victim is None:
            return (forward,)
        gone: tuple[Action, ...] = (freed(kept.pop(victim)),) if victim < len(kept) else ()
        kept.append(live)
        return (*gone, Keep(live), forward)

    def backward(self) -> Node:
        """The whole backward of the steps made so far, binomial checkpointing in the slots that become free."""
        if not self.steps:
            raise InputError(f"{NAME}: no step has been made, so there is nothing to reverse; call advance() first")
        parts: dict[Part, Twins] = {}
        out: list[Node] = [Phase(PhaseKind.BACKWARD)]
        ends = pairwise((*self._kept, self.steps))
        for index, (start, stop) in reversed(list(enumerate(ends))):
            part = Part(stop - start, self.slots - index)
            out += (Restore(start), Shift(reversal(part, binomial_cut, parts).kept, start))
        return Series(tuple(out))

    def schedule(self) -> Schedule:
        """Forward and backward of the steps made so far, as the judge and the executor take it; the run may go on."""
        again = Online(self.slots, self.rule)
        out: list[Node] = [Phase(PhaseKind.FORWARD)]
        for _ in range(self.steps):
            for action in again.advance():
                if isinstance(action, Forward) and isinstance(before := out[-1], Forward):
                    out[-1] = Forward(before.start, action.stop)
                else:
                    out.append(action)
        return Schedule(Series((*out, self.backward())), self.steps, planner=NAME)


Victim: TypeAlias = Callable[[list[int], int], "int | None"]
"""Which of the kept states (by place) gives way to the live one: their number for none, None to keep what there is."""


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    slots: int | None = None,
    rule: Rule = "stumm_walther_2",
) -> Schedule:
    """What `Online` does when a run turns out to have as many steps as the profile has stages.

    ``slots`` left out: the most of a fixed list that fits the budget. `revolve` needs fewer forwards where the
    length is known before. A tree of O(n) nodes. Raises BudgetError when nothing fits, InputError as `Online`.
    """
    n = len(profile)
    numbers = counts(n) if slots is None else [positive(NAME, "slots", slots, n)]
    trees = [_tree(n, number, rule) for number in numbers]
    if len(trees) > 1:  # more slots need not mean fewer forwards
        trees = [root for _, root in by_seconds(trees, profile)]
    return first_fit(NAME, trees, profile, budget)


def timed(profile: Profile) -> list[tuple[float, Node]]:
    """Seconds and trees of a fixed list of slot counts, fastest first."""
    n = len(profile)
    return by_seconds((_tree(n, number, "stumm_walther_2") for number in counts(n)), profile)


def _tree(n: int, slots: int, rule: Rule) -> Node:
    run = Online(slots, rule)
    for _ in range(n):
        run.advance()
    return run.schedule().root


class _Levels:
    """Wang, Moin & Iaccarino: see `Online`."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.levels: list[float] = []

    def __call__(self, kept: list[int], live: int) -> int | None:
        levels = self.levels
        if len(kept) < self.slots:
            levels.append(0 if kept else inf)
            return len(kept)
        if self.slots == 1:
            return None
        highest = levels[-1]
        for place in range(len(kept) - 2, 0, -1):
            if levels[place] < highest:
                del levels[place]
                levels.append(0)
                return place
            highest = max(highest, levels[place])
        levels[-1] += 1
        return len(kept) - 1


class _Reach:
    """Stumm & Walther I: gaps stay within what their slots reach with ``t`` repetitions; see `Online`."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.t = 2

    def __call__(self, kept: list[int], live: int) -> int | None:
        if len(kept) < self.slots:
            return len(kept)
        if self.slots == 1 or live - kept[-1] < 2:
            return None
        ends = [*kept, live]
        while True:
            for place in range(len(kept) - 1, 0, -1):
                if ends[place + 1] - ends[place - 1] <= reach(self.slots - place + 1, self.t - 1):
                    return place
            if live - kept[-1] < self.t:
                return None
            self.t += 1


class _Cheapest:
    """Stumm & Walther II: the one whose loss makes the reversal of what was run so far cheapest; see `Online`."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.known: dict[tuple[int, int], int] = {}

    def least_forwards(self, gap: int, slots: int) -> int:
        """The recurrences' function of this name, each value once."""
        found = self.known.get((gap, slots))
        if found is None:
            found = self.known[gap, slots] = least_forwards(gap, slots)
        return found

    def __call__(self, kept: list[int], live: int) -> int | None:
        count, slots, least_forwards = len(kept), self.slots, self.least_forwards
        if count < slots:
            return count
        ends = [*kept, live, live + 1]
        gaps = [b - a for a, b in pairwise(ends)]
        now = [least_forwards(gap, slots - place) for place, gap in enumerate(gaps[:-1])]
        now[-1] = least_forwards(gaps[-2] + 1, 1)  # without keeping the live state
        best, victim, later, lost = 0, None, 0, 0  # forwards from here on: if a slot is given up, and as they are now
        for place in range(count - 1, 0, -1):
            later += least_forwards(gaps[place + 1], slots - place)
            lost += now[place]
            merged = least_forwards(gaps[place - 1] + gaps[place], slots - place + 1)
            change = merged + later - lost - now[place - 1]
            if change < best or (victim is None and change <= 0):
                best, victim = change, place
        return victim


RULES: Mapping[str, Callable[[int], Victim]] = MappingProxyType(
    {"stumm_walther_1": _Reach, "stumm_walther_2": _Cheapest, "wang_moin": _Levels}
)
