"""``inputs=``: what a step is given beside the state, read a block of steps at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from tapestream.errors import InputError
from tapestream.executor.loop.traits import Source
from tapestream.runner.state import replica

_BLOCK = 64


class Counted:
    """``range``: the step's number, or any other regular sequence of integers."""

    differentiable = False
    tensors: tuple[torch.Tensor, ...] = ()
    gradients: Sequence[torch.Tensor | None] = ()

    def __init__(self, numbers: range) -> None:
        self.length: int | None = len(numbers)
        self._numbers = numbers

    def read(self, start: int, stop: int) -> Iterable[Any]:
        """See `Source`."""
        return self._numbers[start:stop]

    def fresh(self, x: Any) -> tuple[Any, Sequence[torch.Tensor]]:
        """Integers get no gradient."""
        return x, ()

    def add(self, step: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Nothing to add."""


class Called(Counted):
    """A function of the step's number. It runs inside the step: what it captures gets its gradient too."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self.length = None
        self.function = function

    def read(self, start: int, stop: int) -> Iterable[Any]:
        """See `Source`."""
        return map(self.function, range(start, stop))


class Rows:
    """The rows of tensors and NumPy arrays (memory-mapped files too), one a step; several in a pytree.

    Arrays are copied to ``device`` 64 rows at a time, so a file larger than memory may be read.
    """

    def __init__(self, rows: Any, device: torch.device) -> None:
        self._leaves, self._spec = pytree.tree_flatten(rows)
        self.device = device
        lengths = set()
        for leaf in self._leaves:
            if not isinstance(leaf, (torch.Tensor, numpy.ndarray)) or not leaf.ndim:
                raise InputError(
                    "Loop: inputs= is a tensor or NumPy array with one row a step (or a pytree of them), a function of "
                    f"the step's number, or a range; found {type(leaf).__name__}"
                )
            lengths.add(len(leaf))
        if len(lengths) != 1:
            raise InputError(f"Loop: all inputs must have one row a step, found lengths {sorted(lengths)}")
        (self.length,) = lengths
        self.tensors = tuple(x for x in self._leaves if isinstance(x, torch.Tensor) and x.requires_grad)
        self.differentiable = bool(self.tensors)
        self._places = [i for i, x in enumerate(self._leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        self._leaves = [x.detach() if isinstance(x, torch.Tensor) else x for x in self._leaves]
        self.gradients: list[torch.Tensor | None] = [None] * len(self.tensors)

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """See `Source`."""
        for begin in range(start, stop, _BLOCK):
            end = min(begin + _BLOCK, stop)
            blocks = [self._block(leaf, begin, end) for leaf in self._leaves]
            if self._spec.is_leaf():
                yield from blocks[0]
            else:
                yield from (pytree.tree_unflatten(row, self._spec) for row in zip(*blocks, strict=True))

    def attached(self) -> Iterator[Any]:
        """The rows, each with its graph."""
        tensors = dict(zip(self._places, self.tensors, strict=True))
        leaves = [tensors.get(i, leaf) for i, leaf in enumerate(self._leaves)]
        columns = [leaf.unbind(0) if i in tensors else self._rows_of(leaf) for i, leaf in enumerate(leaves)]
        yield from (pytree.tree_unflatten(row, self._spec) for row in zip(*columns, strict=True))

    def _rows_of(self, leaf: Any) -> Iterator[Any]:
        for begin in range(0, self.length or 0, _BLOCK):
            yield from self._block(leaf, begin, min(begin + _BLOCK, self.length or 0))

    def _block(self, leaf: Any, start: int, stop: int) -> Sequence[torch.Tensor]:
        if isinstance(leaf, numpy.ndarray):
            copied: torch.Tensor = torch.from_numpy(numpy.array(leaf[start:stop]))
            return copied.to(self.device).unbind(0)
        return leaf[start:stop].unbind(0)  # type: ignore[no-any-return]

    def fresh(self, x: Any) -> tuple[Any, Sequence[torch.Tensor]]:
        """See `Source`."""
        return self.entering(x, _leaf)

    def entering(self, x: Any, enter: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """``x`` with what ``enter`` makes of its tensors that get a gradient, and these."""
        leaves = pytree.tree_leaves(x)
        made = []
        for place in self._places:
            leaves[place] = enter(leaves[place])
            made.append(leaves[place])
        return (leaves[0] if self._spec.is_leaf() else pytree.tree_unflatten(leaves, self._spec)), made

    def add(self, step: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """See `Source`."""
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                total = self.gradients[i]
                if total is None:
                    total = self.gradients[i] = torch.zeros_like(self.tensors[i])
                total[step].copy_(gradient)


Inputs = Counted | Rows


@dataclass(frozen=True, slots=True)
class Feed:
    """What step ``number`` is given beside the state when it is watched: its ``row``, or what a function gives inside
    of the step, as it may use parameters, too."""

    source: Inputs | None
    number: int
    row: Any = None

    @classmethod
    def of(cls, source: Inputs | None, number: int) -> "Feed":
        """For one step."""
        if not isinstance(source, Rows):
            return cls(source, number)
        (row,) = source.read(number, number + 1)
        return cls(source, number, row)

    def given(self, enter: Callable[[torch.Tensor], torch.Tensor] | None = None) -> tuple[Any, ...]:
        """The further arguments of the step. With ``enter``, which is given rows' tensors that get a gradient, copies:
        nobody knows yet whether the step writes into them."""
        if self.source is None:
            return ()
        if isinstance(self.source, Rows):
            if enter is None:
                return (pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self.row),)
            return (self.source.entering(pytree.tree_map_only(torch.Tensor, replica, self.row), enter)[0],)
        (x,) = self.source.read(self.number, self.number + 1)
        return (pytree.tree_map_only(torch.Tensor, _copied, x),)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.requires_grad else replica(tensor)  # a step may write into what is the caller's


def source_of(inputs: Any, device: torch.device) -> Inputs | None:
    """The source that ``inputs=`` describes."""
    if inputs is None:
        return None
    if isinstance(inputs, range):
        return Counted(inputs)
    if callable(inputs) and not isinstance(inputs, torch.Tensor):
        return Called(inputs)
    return Rows(inputs, device)


def check_protocol(source: Inputs) -> Source:
    """Every kind of inputs is a `Source`."""
    return source
