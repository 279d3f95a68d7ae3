"""`Step`: an operation of the last call of a program, to tell whether a call is that operation again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from tapestream.executor.program.calls.patterns import Pattern
from tapestream.executor.program.calls.templates import ATOMS, PLACE, Held, alike


class Number(int):
    """Stands for the value, or the external tensor, that has this number."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Stands for a container with tensors in it, which have these numbers."""

    template: Held
    numbers: tuple[int, ...]

    def tensors_of(self, value: Any) -> Iterator[tuple[int, torch.Tensor]] | None:
        """The tensors in ``value`` by their numbers, None where it is another container or has other constants."""
        found = list[torch.Tensor]()
        if not alike((self.template,), (value,), found) or len(found) != len(self.numbers):
            return None
        return zip(self.numbers, found, strict=True)


@dataclass(slots=True)
class Step:
    """An operation that can be followed. ``numbers`` of its tensors; ``packs``: how often it saves; ``made``: how many
    tensors, all new, or 0: its first argument is what it gives; ``writes``: storages of others, of which it says that
    it writes into them.

    ``names`` of those given by name, which come last; ``expected``: what a call is to be given, tensors by `Number`
    and `Numbers`; constants are the very objects that were given last, where these cannot change.
    """

    pattern: Pattern
    numbers: tuple[int, ...]
    packs: int
    made: int
    ambient: int
    writes: tuple[int, ...]
    function: Callable[..., Any] = field(init=False)
    names: tuple[str, ...] = field(init=False)
    expected: list[Any] = field(init=False)
    _templates: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        kwargs = self.pattern.kwargs or {}
        self.function, self.names = self.pattern.function, tuple(kwargs)
        self._templates = (*self.pattern.args, *kwargs.values())
        numbers = iter(self.numbers)
        self.expected = [_expected(template, numbers) for template in self._templates]

    def agrees(self, given: Sequence[Any]) -> bool:
        """Whether the constants in what a call is given are those of ``expected``, if not the same objects."""
        for place, (expected, value) in enumerate(zip(self.expected, given, strict=True)):
            if type(expected) is Number or type(expected) is Numbers or value is expected:
                continue
            if not alike((self._templates[place],), (value,), []):
                return False
            if _is_fixed(value):
                self.expected[place] = value
        return True


def _expected(template: Any, numbers: Iterator[int]) -> Any:
    if template is PLACE:
        return Number(next(numbers))
    count = _places(template)
    return Numbers(template, tuple(islice(numbers, count))) if count else template


def _places(template: Any) -> int:
    """How many tensors there are in it."""
    return (template is PLACE) + (sum(map(_places, template.items)) if type(template) is Held else 0)


def _is_fixed(value: Any) -> bool:
    kinds = map(type, value) if type(value) in (tuple, torch.Size) else (type(value),)
    return all(kind in ATOMS or kind is float for kind in kinds)
