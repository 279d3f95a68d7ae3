"""Heterogeneous chains in bytes (Beaumont, Herrmann, Pallez, Shilova 2019; ACM TOMS 2024), "rotor"."""

from collections.abc import Iterator, Sequence
from math import gcd, inf
from typing import NamedTuple

from tapestream.costs import Budget, Machine, Profile
from tapestream.ir import Forward, Keep, Node, Phase, PhaseKind, Restore, Schedule, Series, Shift
from tapestream.planners._fit import device_limit, first_fit, positive, surely_held
from tapestream.planners._recurrences import freed, recorded, reversed_stages
from tapestream.planners._rotor_tables import Fastest, Leanest, Scale, Solution
from tapestream.planners._units import Run, arrange
from tapestream.planners.store_all import stored

NAME = "rotor"


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    memory_steps: int | None = None,
) -> Schedule:
    """Least seconds within the budget among memory-persistent schedules.

    Those are: a state once kept stays until its stage is recorded, a record until its backward, and a backward comes as
    soon as it can. Memory counts in steps of budget / ``memory_steps`` (at most 5000; None: 2000, from 64 stages on
    fewer, down to 500), sizes rounded up; exactly where the greatest common divisor of all sizes is at least that step.
    O(n^3 memory_steps). Gradients that stay (``StageCost.gradient_nbytes``) leave less and less room from
    the last stage to the first, which the recurrence knows (ours; still optimal). Up to 128 stages are treated
    one by one; longer chains as 100 runs of stages, each recorded as a whole or solved on its own in the memory left at
    that point (a choice of ours, not optimal). Carried storages that do not pass through all states count with each
    state (safe, not tight). The leanest schedule, computed in exact bytes, is tried too, so rounding never turns a
    feasible budget into an error. Raises BudgetError with the leanest schedule's peak, InputError for memory_steps
    below 1.
    """
    steps = None if memory_steps is None else positive(NAME, "memory_steps", memory_steps, 5000)
    found = (root for _, root in timed(profile, device_limit(budget), steps))
    return first_fit(NAME, found, profile, budget)


def timed(profile: Profile, limit: int | None, steps: int | None = None) -> Iterator[tuple[float, Node]]:
    """Trees and their seconds, fastest first; the tables are not built where everything stored fits."""
    if limit is None or surely_held(profile) <= limit:  # judging it takes time in long chains
        yield 0.0, stored(len(profile))
    run, always = Run.of(profile)
    units = arrange(run, profile.turn_nbytes, 128 if len(run) <= 128 else 100, 24)
    leanest = Leanest(units)
    solutions: list[tuple[float, Node]] = [(leanest.seconds, tree(leanest, 0, 0, {}))]
    if limit is not None and limit > always:
        if steps is None:  # a table of at most as many numbers as 500 steps and 128 units take
            steps = max(500, min(2000, 500 * 128**2 // len(units.units) ** 2))
        scale = Scale.of(limit - always, steps, gcd(run.grain(), profile.turn_nbytes))
        fastest = Fastest(units, scale)
        if fastest.seconds < inf:
            solutions.append((fastest.seconds, tree(fastest, 0, scale.capacity, {})))
    for seconds, root in sorted(solutions, key=lambda pair: pair[0]):
        yield seconds + profile.turn_seconds, opening(root)


def opening(root: Node) -> Node:
    """The schedule of which ``root`` is all after its first action."""
    return Series((Phase(PhaseKind.FORWARD), root))


class Problem(NamedTuple):
    """Units a .. b with so many memory steps; see `_rotor_tables`."""

    held: int
    a: int
    b: int
    memory: int


Known = dict[tuple[int, int, int], Node]
"""Trees of inner solutions by (identity, held, memory): equal groups share them."""


def tree(solution: Solution, held: int, memory: int, known: Known) -> Node:
    """The actions of a solved chain, its first stage being number 0 and its first state live."""
    return tree_of(solution, [Problem(held, 0, len(solution.chain.units) - 1, memory)], known)


def tree_of(solution: Solution, items: Sequence[Node | Problem], known: Known) -> Node:
    """The actions of ``items``, problems of a solved chain among them."""
    out: list[Node] = []
    stack = list(reversed(items))
    while stack:
        item = stack.pop()
        if isinstance(item, Problem):
            stack += reversed(list(_steps(solution, item, known)))
        elif isinstance(item, Keep) and out and out[-1] == freed(item.stage):
            out.pop()  # freed and kept again: it simply stays kept
        else:
            out.append(item)
    return Series(tuple(out))


def _steps(solution: Solution, problem: Problem, known: Known) -> Iterator[Node | Problem]:
    """A problem taken apart once."""
    held, a, b, memory = problem
    unit = solution.chain.units[a]
    first, stop = unit.first, unit.stop
    if first == stop:
        yield Phase(PhaseKind.BACKWARD)
        return
    cut, rest = solution.choose(held, a, b, memory)
    if a == b and unit.inner:
        inside = solution.inside(unit.inner)
        key = id(inside), held, rest
        if key not in known:
            known[key] = tree(inside, held, rest, known)
        yield Shift(known[key], first)
        return
    if cut:
        middle = solution.chain.units[a + cut].first
        yield Keep(first)
        yield Forward(first, middle)
        yield Problem(0, a + cut, b, rest)
        yield Restore(first)
        yield freed(first)
        yield Problem(held, a, a + cut - 1, memory)
        return
    yield recorded(first, stop)
    if a < b:
        yield Problem(int(unit.reads_output), a + 1, b, rest)
    yield reversed_stages(first, stop)
