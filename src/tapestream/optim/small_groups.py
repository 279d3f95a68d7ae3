"""Small copies of an optimizer's groups, on which it is tried."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_GROUPS, _ALIKE = 6, 3


@dataclass(frozen=True, slots=True)
class SmallGroup:
    """Options of a group, and tensors alike its own but small: shapes and dtypes of what the optimizer sees."""

    options: Mapping[str, Any]
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]


def small_group(options: Mapping[str, Any], tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> SmallGroup:
    """At most a few tensors of each kind: number of dimensions and dtype."""
    kinds: defaultdict[object, list[tuple[tuple[int, ...], torch.dtype]]] = defaultdict(list)
    for shape, dtype in tensors:
        alike = kinds[len(shape), dtype]
        if len(alike) < _ALIKE:
            alike.append((shape, dtype))
    return SmallGroup(options, tuple(one for alike in kinds.values() for one in alike))


def stand_ins(group: SmallGroup, device: torch.device) -> list[torch.Tensor]:
    """Its tensors, with one element each and no gradient."""
    return [
        torch.nn.Parameter(torch.zeros((1,) * len(shape), dtype=dtype, device=device)) for shape, dtype in group.tensors
    ]


def various_of(groups: Sequence[SmallGroup]) -> list[SmallGroup]:
    """A few groups, as different as there are."""
    kinds: defaultdict[object, list[SmallGroup]] = defaultdict(list)
    for group in groups:
        if group.tensors:
            options = tuple((k, bool(v) if isinstance(v, int | float) else repr(v)) for k, v in group.options.items())
            kinds[options, tuple({(len(shape), dtype) for shape, dtype in group.tensors})].append(group)
    rows = [alike[:2] for alike in kinds.values()]
    first = [row[0] for row in rows][:_GROUPS]
    return [*first, *(group for row in rows for group in row[1:])][:_GROUPS]
