"""``inputs=``: what a step is given beside the state, read a block of steps at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from tapestream.errors import InputError
from tapestream.executor.loop.traits import Source

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
        self._function = function

    def read(self, start: int, stop: int) -> Iterable[Any]:
        """See `Source`."""
        return map(self._function, range(start, stop))


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

    def _block(self, leaf: Any, start: int, stop: int) -> Sequence[torch.Tensor]:
        if isinstance(leaf, numpy.ndarray):
            copied: torch.Tensor = torch.from_numpy(numpy.array(leaf[start:stop]))
            return copied.to(self.device).unbind(0)
        return leaf[start:stop].unbind(0)  # type: ignore[no-any-return]

    def fresh(self, x: Any) -> tuple[Any, Sequence[torch.Tensor]]:
        """See `Source`."""
        leaves = pytree.tree_leaves(x)
        made = []
        for place in self._places:
            leaves[place] = leaves[place].detach().requires_grad_()
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
