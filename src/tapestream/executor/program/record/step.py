"""`Step`: an operation of the last call of a program, to tell whether a call is that operation again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tapestream.executor.program.calls.patterns import Pattern
from tapestream.executor.program.calls.templates import ATOMS, PLACE, Held, alike


@dataclass(frozen=True, slots=True)
class Numbers:
    """Stands for a container with tensors in it, which have these numbers."""

    template: Held
    numbers: tuple[int, ...]

    def tensors_of(self, value: Any) -> Iterator[tuple[int, torch.Tensor]] | None:
        """The tensors in ``value`` by their numbers, None where it is another container or has other constants."""
        found: list[torch.Tensor] = []
        if not alike((self.template,), (value,), found) or len(found) != len(self.numbers):
            return None
        return zip(self.numbers, found, strict=True)


PRODUCTS = frozenset(
    ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", "outer",
     "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
)  # fmt: skip
"""Functions that multiply matrices, or convolve."""
CONSTANT, MADE, OUTSIDE, SEVERAL = range(4)
"""What an argument is: a constant, a value, an external tensor, a container with tensors in it."""


@dataclass(slots=True)
class Step:
    """An operation that can be followed. ``numbers`` of its tensors; ``packs``: how often it saves; ``made``: how many
    tensors, all new, or 0: its first argument is what it gives; ``writes``: storages of others, of which it says that
    it writes into them.

    ``names`` of those given by name, which come last; ``expected``: what a call is to be given, and by ``kinds`` what
    each is: a value by its number, an external tensor ``~k`` by k, or `Numbers`; constants are the very objects that
    were given last, where these cannot change.
    """

    pattern: Pattern
    numbers: tuple[int, ...]
    packs: int
    made: int
    ambient: int
    writes: tuple[int, ...]
    function: Callable[..., Any] = field(init=False)
    names: tuple[str, ...] = field(init=False)
    attends: bool = field(init=False)
    multiplies: bool = field(init=False)
    kinds: tuple[int, ...] = field(init=False)
    expected: list[Any] = field(init=False)
    _templates: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        kwargs = self.pattern.kwargs or {}
        self.function, self.names = self.pattern.function, tuple(kwargs)
        self.attends = self.function is scaled_dot_product_attention
        self.multiplies = getattr(self.function, "__name__", "") in PRODUCTS
        self._templates = (*self.pattern.args, *kwargs.values())
        numbers = iter(self.numbers)
        found = [_expected(template, numbers) for template in self._templates]
        self.kinds, self.expected = tuple(kind for kind, _ in found), [expected for _, expected in found]

    def agrees(self, given: Sequence[Any]) -> bool:
        """Whether the constants in what a call is given are those of ``expected``, if not the same objects."""
        for place, (kind, expected, value) in enumerate(zip(self.kinds, self.expected, given, strict=True)):
            if kind != CONSTANT or value is expected:
                continue
            if not alike((self._templates[place],), (value,), []):
                return False
            if _is_fixed(value):
                self.expected[place] = value
        return True


def _expected(template: Any, numbers: Iterator[int]) -> tuple[int, Any]:
    if template is PLACE:
        number = next(numbers)
        return (MADE, number) if number >= 0 else (OUTSIDE, ~number)
    count = places_in((template,))
    return (SEVERAL, Numbers(template, tuple(islice(numbers, count)))) if count else (CONSTANT, template)


def places_in(templates: Iterable[Any]) -> int:
    """How many tensors there are in them."""
    return sum(places_in(one.items) if type(one) is Held else one is PLACE for one in templates)


def _is_fixed(value: Any) -> bool:
    kinds = map(type, value) if type(value) in (tuple, torch.Size) else (type(value),)
    return all(kind in ATOMS or kind is float for kind in kinds)
