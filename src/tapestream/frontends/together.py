"""Calls of chains and loops in one backward that use the same tensors: each goes on with the sums of those before it.

Plain autograd adds what arrives for a tensor one part after the other. If a call gave the sum of its own parts, these
would be added among themselves first, and the last bits would be others.
"""

import weakref
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch

from tapestream.frontends.giving_way import Reason

Key: TypeAlias = tuple[int, ...]
"""What one sum is of: the id of a tensor; of one that autocast casts, those of its region and dtype, too."""

_OPEN: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""Nodes of calls whose backward has not begun."""


@dataclass(slots=True)
class Together:
    """One backward. ``waiting``: how many calls have yet to go on with the sum of a `Key`. ``sums``: so far."""

    task: int
    waiting: Counter[Key] = field(default_factory=Counter)
    sums: dict[Key, torch.Tensor] = field(default_factory=dict)

    def take(self, key: Key | None) -> torch.Tensor | None:
        """The sum so far, with which the call that takes it begins."""
        return None if key is None else self.sums.pop(key, None)

    def left(self, key: Key | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What is to be given to autograd: ``gradient``, or none where another call goes on with it."""
        if key is None or gradient is None or self.waiting[key] <= 0 or key in self.sums:
            return gradient
        self.sums[key] = gradient
        return None


class Open(Protocol):
    """A call whose backward has not begun."""

    together: Together | None
    given_up: Reason | None

    def adds_to(self) -> Collection[Key]:
        """The sums to which it adds several parts."""


def region_of_autocast(device: torch.device) -> object | None:
    """What stands for the outermost autocast here: it casts each weight once, whose parts then are one sum in the dtype
    of the cast. None where it casts for each use."""
    if not torch.is_autocast_cache_enabled():
        return None
    with torch.enable_grad():
        product = _probe(device) @ _probe(device)
    return None if product.grad_fn is None else product.grad_fn.next_functions[0][0]  # the one cast


@cache
def _probe(device: torch.device) -> torch.Tensor:
    return torch.ones(1, 1, dtype=torch.float32, device=device, requires_grad=True)


def opened(node: Any) -> None:
    """The call ``node.call`` waits for its backward."""
    _OPEN[id(node)] = node


def begun(node: Any, call: Open) -> Together:
    """The backward that ``call`` is a part of, which is under way. Raises BudgetError where that needs a call that has
    given way to another (see `giving_way`)."""
    _OPEN.pop(id(node), None)
    if call.given_up is not None:
        raise call.given_up()
    task, found = torch._C._current_graph_task_id(), call.together
    if found is not None and found.task == task:
        found.waiting.subtract(call.adds_to())
        return found
    found = Together(task)
    for reference in _OPEN.valuerefs():
        other: Any = reference()
        waiting: Open | None = None if other is None else other.call
        if waiting is not None and torch._C._will_engine_execute_node(other):
            if waiting.given_up is not None:
                raise waiting.given_up()
            waiting.together = found
            found.waiting.update(waiting.adds_to())
    return found
