"""`Contexts`: what a call keeps beside its tape: what Functions keep on their contexts, where no hook sees it, with
those that run again instead; and what operations save that are not noted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tapestream.accelerator.memory import storage_nbytes
from tapestream.executor.program.calls.hidden import Hidden
from tapestream.executor.program.calls.patterns import tensors_of
from tapestream.executor.program.calls.rerun import Rerun, can_rerun, context_of, kept_nbytes
from tapestream.executor.program.calls.seams import Apply
from tapestream.executor.program.calls.users import is_custom

_SHARE = 0.01
"""Of the budget: so much may be kept before Functions run again."""


@dataclass(slots=True)
class Contexts:
    """Those of one call. ``again``: Functions that are run again, in all calls of a program. ``room_nbytes``: the
    call's budget. ``nbytes``: what is kept, by the Functions ``names``; ``stuck``: by name, what is kept by those that
    cannot run again. ``unnoted_nbytes``: what operations hold that are not noted, each storage once."""

    again: set[str]
    room_nbytes: float = float("inf")
    nbytes: int = 0
    names: set[str] = field(default_factory=set)
    stuck: dict[str, int] = field(default_factory=dict)
    unnoted_nbytes: int = 0
    _storages: set[int] = field(default_factory=set)

    def function(self, function: Any, hidden: Hidden) -> Any:
        """What is to be called in place of ``function``; ``hidden``: what it uses beside its arguments."""
        return (
            Rerun(function.cls, hidden) if type(function) is Apply and _name(function.cls) in self.again else function
        )

    def hold(self, tensor: torch.Tensor) -> None:
        """An operation that is not noted keeps ``tensor``."""
        memory = tensor.untyped_storage()
        if memory._cdata not in self._storages:
            self._storages.add(memory._cdata)
            self.unnoted_nbytes += storage_nbytes(memory)

    def look(self, function: Any, args: Sequence[Any], versions: Sequence[int], result: Any, hidden: Hidden) -> int:
        """The bytes that a call has kept; its class runs again from now on, if it may and that is much. ``hidden``
        hears how much it has saved by its context."""
        own = type(function) is Apply
        if not (own or is_custom(function)):
            return 0
        results = tensors_of(result, [])
        context = context_of(results)
        hidden.saved = -1 if context is None else len(context._raw_saved_tensors)
        nbytes = kept_nbytes(context, results, args)
        if nbytes:
            self.nbytes += nbytes
            self.names.add(function.__name__)
            if not (own and can_rerun(result, args, versions)):
                self.stuck[function.__name__] = self.stuck.get(function.__name__, 0) + nbytes
            elif self.nbytes > _SHARE * self.room_nbytes:
                self.again.add(_name(function.cls))
        return nbytes


def _name(cls: type) -> str:
    """Not the class itself, which would live as long."""
    return f"{cls.__module__}.{cls.__qualname__}"


def versions_of(args: Sequence[Any]) -> list[int]:
    """Of the tensors among the arguments of a call."""
    return [t._version for t in args if isinstance(t, torch.Tensor)]
