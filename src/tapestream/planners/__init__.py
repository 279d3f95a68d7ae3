"""Planners decide what is kept, moved and recomputed.

Each is a pure function ``plan(profile, budget, machine, **knobs) -> Schedule``.
"""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import TypeAlias

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import Schedule
from tapestream.planners import (
    async_multistage,
    bisection,
    double,
    join,
    joint,
    least_peak,
    offload,
    online,
    periodic,
    revolve,
    rotor,
    store_all,
    superneurons,
)
from tapestream.planners._bound import least_seconds
from tapestream.planners.classic import (
    binomial,
    disk_revolve,
    h_revolve,
    mixed,
    periodic_disk_revolve,
)

__all__ = ["Planner", "keywords_of", "least_seconds", "nearest", "planners"]

Planner: TypeAlias = Callable[..., Schedule]
"""``planner(profile, budget=None, machine=None, **knobs)``; unknown knobs raise InputError."""


def _with_known_knobs(name: str, plan: Planner) -> Planner:
    """``plan``, refusing knobs that it does not have."""
    known = keywords_of(plan)

    @wraps(plan)
    def planner(
        profile: Profile,
        budget: Budget | str | int | None = None,
        machine: Machine | None = None,
        **knobs: object,
    ) -> Schedule:
        for knob in knobs:
            if knob not in known:
                has = f"its knobs are {', '.join(known)}" if known else "it has none"
                raise InputError(f"planner {name!r} has no knob {knob!r}; {has}{nearest(knob, known)}")
        for what, kind in ((profile, Profile), (machine, Machine | None)):
            if not isinstance(what, kind):
                wanted = "a Profile" if kind is Profile else "a Machine or None"
                raise InputError(f"planner {name!r} takes {wanted}, not {what!r}")
        if profile.ends and plan is not join.plan:
            raise InputError(
                f"planner {name!r} is for a chain, and here {len(profile.branches)} branches meet; use 'join'"
            )
        return plan(profile, budget, machine, **knobs)

    return planner


def keywords_of(function: Callable[..., object]) -> list[str]:
    """The names of the arguments that it takes by name alone: of a planner, its knobs."""
    return [one.name for one in signature(function).parameters.values() if one.kind is Parameter.KEYWORD_ONLY]


def nearest(word: str, words: list[str]) -> str:
    """The end of a message about ``word``, where one of ``words`` may have been meant."""
    close = get_close_matches(word, words, 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class _Registry(Mapping[str, Planner]):
    """Planners by name; an unknown name raises InputError with the names there are."""

    __slots__ = ("_plans",)

    def __init__(self, **plans: Planner) -> None:
        self._plans = {name: _with_known_knobs(name, plan) for name, plan in plans.items()}

    def __getitem__(self, name: str) -> Planner:
        if name not in self:
            names = list(self)
            raise InputError(f"there is no planner {name!r}; there are {', '.join(names)}{nearest(str(name), names)}")
        return self._plans[name]

    def __contains__(self, name: object) -> bool:
        return name in self._plans

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)


planners: Mapping[str, Planner] = _Registry(
    store_all=store_all.plan,
    periodic=periodic.plan,
    bisection=bisection.plan,
    revolve=revolve.plan,
    rotor=rotor.plan,
    binomial=binomial.plan,
    mixed=mixed.plan,
    h_revolve=h_revolve.plan,
    disk_revolve=disk_revolve.plan,
    periodic_disk_revolve=periodic_disk_revolve.plan,
    double=double.plan,
    async_multistage=async_multistage.plan,
    online=online.plan,
    least_peak=least_peak.plan,
    superneurons=superneurons.plan,
    offload=offload.plan,
    joint=joint.plan,
    join=join.plan,
)
