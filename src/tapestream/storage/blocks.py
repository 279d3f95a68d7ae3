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
    ``whole``: that is all of them; ``first``: of those of this parameter that are updated here, the one with which
    counters of steps go on."""

    number: int
    start: int
    stop: int
    whole: bool = True
    first: bool = True

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


@dataclass(frozen=True, slots=True)
class Share:
    """What this process, ``rank`` of ``ranks``, keeps of every parameter block below the device: one of as many equal
    parts of its bytes, the block's shard."""

    rank: int = 0
    ranks: int = 1

    def of(self, nbytes: int) -> tuple[int, int]:
        """The first of these bytes that are the shard's, and the one behind the last."""
        part = nbytes // self.ranks
        return self.rank * part, (self.rank + 1) * part


@dataclass(slots=True, eq=False)
class ParameterBlock:
    """Block ``index``: Parameter objects keep their identity; only what ``.data`` shows changes.

    PARAMETERS holds those numbered ``trained``: those that take gradients, or all where none does; ``layout`` is that
    of GRADIENT too. BUFFERS holds the others, ``frozen``, which no update changes, so that they are never written
    back and have no bytes of gradients. ``state_parts``: the optimizer's state and what each part of it covers.
    ``unit``: the bytes of parameters and gradients, and of their shards, are multiples of it, as direct transfers need.
    ``share``: which shard is this process's own. Optimizer state is that of the shard.
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
    share: Share = Share()
    _once: set[int] = field(init=False, default_factory=set)
    _own: dict[bool, dict[int, tuple[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.strides = tuple(p.stride() if _dense(p) else _contiguous(p) for p in self.parameters)
        self.divide()

    def divide(self) -> None:
        """Lay out what takes gradients now, or has taken some, apart from what never did."""
        self._once |= {i for i, p in enumerate(self.parameters) if p.requires_grad}
        self.trained, self.frozen = divided([i in self._once for i in range(len(self.parameters))])
        unit = self.unit * self.share.ranks
        self.layout, self.frozen_layout = (
            Layout.of(((tuple(self.parameters[i].shape), self.parameters[i].dtype) for i in numbers), unit)
            for numbers in (self.trained, self.frozen)
        )
        self._own = {}

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
        """Bytes of one of its values, whole; of the state, of what this process has."""
        match kind:
            case Kind.OPTIMIZER_STATE:
                return self.state_parts[part].nbytes if self.state_parts else 0
            case Kind.BUFFERS:
                return self.frozen_layout.nbytes
            case _:
                return self.layout.nbytes

    def shard_nbytes_of(self, kind: Kind, part: int = 0) -> int:
        """The same of what this process has of it below the device."""
        nbytes = self.nbytes_of(kind, part)
        return nbytes if kind is Kind.OPTIMIZER_STATE else nbytes // self.share.ranks

    def views(self, memory: torch.Tensor, kind: Kind = Kind.PARAMETERS) -> dict[int, torch.Tensor]:
        """By number, tensors of the parameters' shapes and strides over the bytes of a value; gradients lie like
        PARAMETERS."""
        numbers, layout = (self.frozen, self.frozen_layout) if kind is Kind.BUFFERS else (self.trained, self.layout)
        return {
            i: view if view.stride() == self.strides[i] else view.as_strided(view.shape, self.strides[i])
            for i, view in zip(numbers, layout.views(memory), strict=True)
        }

    def own_elements(self, kind: Kind = Kind.PARAMETERS) -> dict[int, tuple[int, int]]:
        """By number, which elements of each parameter, in the order in which they lie in memory, are in the shard."""
        frozen = kind is Kind.BUFFERS
        if frozen not in self._own:  # looked at for every piece of an update
            numbers, layout = (self.frozen, self.frozen_layout) if frozen else (self.trained, self.layout)
            found = layout.within(*self.share.of(layout.nbytes))
            self._own[frozen] = {i: found.get(at, (0, 0)) for at, i in enumerate(numbers)}
        return self._own[frozen]

    def own(self, memory: torch.Tensor, kind: Kind = Kind.PARAMETERS) -> dict[int, torch.Tensor]:
        """These elements by number, in one dimension, over the bytes of a shard."""
        return {
            i: self.piece_in(memory, Piece(i, start, stop, whole=False), kind)
            for i, (start, stop) in self.own_elements(kind).items()
        }

    def piece_in(self, memory: torch.Tensor, piece: Piece, kind: Kind = Kind.PARAMETERS) -> torch.Tensor:
        """A piece of a parameter that the shard has, over the bytes of the shard: of the parameter's shape where it is
        whole, in one dimension elsewhere."""
        numbers, layout = (self.frozen, self.frozen_layout) if kind is Kind.BUFFERS else (self.trained, self.layout)
        at, (first, _) = numbers.index(piece.number), self.share.of(layout.nbytes)
        dtype = layout.dtypes[at]
        start = layout.offsets[at] + piece.start * dtype.itemsize - first if piece.elements else 0
        flat = memory.narrow(0, start, piece.elements * dtype.itemsize).view(dtype)
        return flat.as_strided(layout.shapes[at], self.strides[piece.number]) if piece.whole else flat

    def take_own(self, memory: torch.Tensor, tensors: Mapping[int, torch.Tensor], kind: Kind) -> None:
        """Copy what is the shard's of whole tensors, by number of their parameter, into the bytes of the shard."""
        spans, own = self.own_elements(kind), self.own(memory, kind)
        for i, tensor in tensors.items():
            start, stop = spans[i]
            if start < stop:
                own[i].copy_(in_memory_order(tensor.detach(), self.strides[i])[start:stop])

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
