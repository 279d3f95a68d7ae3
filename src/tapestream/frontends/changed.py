"""Front ends with other options than their own."""

import copy
from typing import Any, Protocol, TypeVar

from tapestream.planning.plan import Plan

T = TypeVar("T")


class Planned(Protocol):
    """Plans one call of a front end, which is not made."""

    def __call__(self, **options: Any) -> Plan:
        """The plan; ``options``: of the front end, which are to be others than its own. Raises BudgetError."""


def changed(front: T, **options: Any) -> T:
    """A front end over the same stages, step or function, with some ``options`` of its class changed: ``planner``
    (without knobs), ``plan``, ``chunk``, ``folder``, ``home``, ``machine``. It knows no plans yet."""
    other: Any = copy.copy(front)
    tiers = other._tiers.keys()
    other._tiers = {**other._tiers, **{name: value for name, value in options.items() if name in tiers}}
    for name, value in options.items():
        if name == "planner":
            other.planner, other._knobs = value, {}
        elif name == "plan":
            other._given = value
        elif name not in tiers:
            setattr(other, name, value)
    found: T = other
    return found
