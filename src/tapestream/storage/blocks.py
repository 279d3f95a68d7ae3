"""`ParameterBlock`: parameters that move together, and how their values lie in runs of bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tapestream.ir.actions import Kind
from tapestream.storage.layout import Layout, in_memory_order
from tapestream.storage.transfer import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of parameter ``number`` of a block, in the order in which they lie in memory;
    ``whole``: that is all of them."""

    number: int
    start: int
    stop: int
    whole: bool = True

    @property
    def elements(self) -> int:
        """How many."""
        return self.stop - self.start

    def of(self, tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
        """These elements of a tensor of the parameter's shape; ``stride`` is the parameter's. The whole tensor, or one
        dimension: a view where the tensor lies in memory like the parameter, a copy elsewhere."""
        return tensor if self.whole else in_memory_order(tensor, stride)[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of the optimizer's state of a block, and what it covers: each element of ``pieces`` is updated with it.

    ``slots``: (number of a piece, name) of each tensor in ``layout``; without a layout there is no state.
    ``extra_nbytes``: transient bytes of the update.
    """

    pieces: tuple[Piece, ...]
    slots: tuple[tuple[int, str], ...] = ()
    layout: Layout | None = None
    extra_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of this part, a multiple of 4096."""
        return 0 if self.layout is None else self.layout.nbytes

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The state tensors over ``memory``, in the order of ``slots``."""
        return [] if self.layout is None else self.layout.views(memory)


@dataclass(slots=True, eq=False)
class ParameterBlock:
    """Block ``index``: Parameter objects keep their identity; only what ``.data`` shows changes.

    PARAMETERS holds those numbered ``trained``: those that take gradients, or all where none does; ``layout`` is that
    of GRADIENT too. BUFFERS holds the others, ``frozen``, which no update changes, so that they are never written
    back and have no bytes of gradients. ``state_parts``: the optimizer's state and what each part of it covers.
    ``unit``: the bytes of parameters and gradients are multiples of it, as direct transfers need.
    """

    index: int
    parameters: Sequence[nn.Parameter]
    trained: tuple[int, ...] = field(init=False)
    frozen: tuple[int, ...] = field(init=False)
    layout: Layout = field(init=False)
    frozen_layout: Layout = field(init=False)
    strides: tuple[tuple[int, ...], ...] = field(init=False)
    state_parts: tuple[StatePart, ...] = ()
    unit: int = ALIGNMENT
    _once: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.strides = tuple(p.stride() if _dense(p) else _contiguous(p) for p in self.parameters)
        self.divide()

    def divide(self) -> None:
        """Lay out what takes gradients now, or has taken some, apart from what never did."""
        self._once |= {i for i, p in enumerate(self.parameters) if p.requires_grad}
        self.trained, self.frozen = divided([i in self._once for i in range(len(self.parameters))])
        self.layout, self.frozen_layout = (
            Layout.of(((tuple(self.parameters[i].shape), self.parameters[i].dtype) for i in numbers), self.unit)
            for numbers in (self.trained, self.frozen)
        )

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters takes a gradient."""
        return any(p.requires_grad for p in self.parameters)

    @property
    def thawed(self) -> bool:
        """Whether a parameter that was frozen when the block was laid out takes gradients now."""
        return any(self.parameters[i].requires_grad for i in self.frozen)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The values that hold its parameters."""
        return (Kind.PARAMETERS, Kind.BUFFERS) if self.frozen else (Kind.PARAMETERS,)

    @property
    def parameters_nbytes(self) -> int:
        """Bytes of all its parameters."""
        return self.layout.nbytes + self.frozen_layout.nbytes

    @property
    def updates(self) -> int:
        """How many updates it takes: one for each part of the state."""
        return max(1, len(self.state_parts))

    def nbytes_of(self, kind: Kind, part: int = 0) -> int:
        """Bytes of one of its values."""
        match kind:
            case Kind.OPTIMIZER_STATE:
                return self.state_parts[part].nbytes if self.state_parts else 0
            case Kind.BUFFERS:
                return self.frozen_layout.nbytes
            case _:
                return self.layout.nbytes

    def views(self, memory: torch.Tensor, kind: Kind = Kind.PARAMETERS) -> dict[int, torch.Tensor]:
        """By number, tensors of the parameters' shapes and strides over the bytes of a value; gradients lie like
        PARAMETERS."""
        numbers, layout = (self.frozen, self.frozen_layout) if kind is Kind.BUFFERS else (self.trained, self.layout)
        return {
            i: view if view.stride() == self.strides[i] else view.as_strided(view.shape, self.strides[i])
            for i, view in zip(numbers, layout.views(memory), strict=True)
        }

    def show(self, views: Mapping[int, torch.Tensor]) -> None:
        """Let parameters' ``.data`` be the view of the same number."""
        for i, view in views.items():
            self.parameters[i].data = view


def divided(trains: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the parameters that PARAMETERS and BUFFERS of a block hold; ``trains``: which take gradients."""
    trained = tuple(i for i, trained in enumerate(trains) if trained or not any(trains))
    inside = set(trained)
    return trained, tuple(i for i in range(len(trains)) if i not in inside)


def _dense(tensor: torch.Tensor) -> bool:
    pairs = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in pairs:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous(tensor: torch.Tensor) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(tensor.shape):
        strides.append(stride)
        stride *= max(1, size)
    return tuple(reversed(strides))
