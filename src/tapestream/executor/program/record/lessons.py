"""`Lessons`: what replays of one call have shown that holds for those of later calls that make the same operations."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tapestream.executor.program.calls.patterns import Pattern
from tapestream.executor.program.calls.values import address_of
from tapestream.executor.program.record.tape import Saved


class _Together(NamedTuple):
    """Two arguments that show one memory, and how far the second begins behind the first."""

    first: int
    second: int
    beside: int


class _View(NamedTuple):
    """A saved tensor over the memory of an argument: which, how that looked, and size, strides and place beside its
    own, None for itself."""

    argument: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    own: tuple[torch.Size, tuple[int, ...], int] | None


class _Views(NamedTuple):
    """What an operation saves, None where that is not known, and which arguments lie ``together``."""

    pattern: Pattern
    views: list[_View] | None
    together: list[_Together]


class _Needs(NamedTuple):
    """What to do with the operations of a stretch, where these values and saved tensors are there."""

    there: frozenset[int]
    saves: frozenset[int]
    todo: bytearray


@dataclass(slots=True)
class Lessons:
    """Of records that are equal, see `Last`."""

    _needs: dict[tuple[int, int], _Needs] = field(default_factory=dict)
    _views: dict[int, _Views] = field(default_factory=dict)

    def needed(
        self, stretch: tuple[int, int], there: Set[int], saves: Set[int], find: Callable[[], bytearray]
    ) -> bytearray:
        """What ``find`` finds (see `Needed.of`), once."""
        known = self._needs.get(stretch)
        if known is None or known.there != there or known.saves != saves:
            known = self._needs[stretch] = _Needs(frozenset(there), frozenset(saves), find())
        return known.todo

    def saved(self, k: int, pattern: Pattern, tensors: Sequence[torch.Tensor]) -> Saved | None:
        """What operation ``k`` saves of ``tensors``, which it is given, if it saves nothing else and that is known."""
        known = self._views.get(k)
        if known is None or known.views is None or known.pattern is not pattern:
            return None
        if any(_beside(tensors[first], tensors[second]) != beside for first, second, beside in known.together):
            return None
        found: Saved = []
        for argument, shape, strides, dtype, own in known.views:
            tensor = tensors[argument]
            if tensor.dtype is not dtype or tensor.shape != shape or tensor.stride() != strides:
                return None
            tensor = tensor.detach()
            if own is not None:
                size, step, beside = own
                tensor = tensor.as_strided(size, step, tensor.storage_offset() + beside)
            found.append((tensor, tensor._version))
        return found

    def has_saved(self, k: int, pattern: Pattern, tensors: Sequence[torch.Tensor], saved: Saved) -> None:
        """Operation ``k`` has saved this of ``tensors``, and may save more."""
        known = self._views.get(k)
        if known is not None and known.pattern is pattern:
            return
        found = [_view_of(one, tensors) for one, _ in saved]
        views = [view for view in found if view is not None]
        together = [
            _Together(i, j, beside)
            for j in range(len(tensors))
            for i in range(j)
            if (beside := _beside(tensors[i], tensors[j])) is not None
        ]
        self._views[k] = _Views(pattern, views if len(views) == len(found) else None, together)


def _beside(first: torch.Tensor, second: torch.Tensor) -> int | None:
    """How many numbers ``second`` begins behind ``first``, None where they show no memory of plain numbers together."""
    if not (_is_plain(first) and _is_plain(second)) or address_of(first) != address_of(second):
        return None
    return int(second.storage_offset()) - int(first.storage_offset())


def _view_of(saved: torch.Tensor, tensors: Sequence[torch.Tensor]) -> _View | None:
    """None where it shows the memory of none of ``tensors``, or that in another way than by numbers as they lie."""
    for place, tensor in enumerate(tensors):
        beside = _beside(tensor, saved)
        if beside is None:
            continue
        if tensor.dtype is not saved.dtype:
            return None
        own = saved.shape, saved.stride(), beside
        same = own == (tensor.shape, tensor.stride(), 0)
        return _View(place, tensor.shape, tensor.stride(), tensor.dtype, None if same else own)
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
