"""Arguments of calls without their tensors: taken apart, filled with others, compared."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from tapestream.executor.program.calls.arrays import BUFFERS, copied
from tapestream.executor.program.calls.foreign import Foreign


class Place:
    """Where a tensor goes."""


PLACE = Place()
ATOMS = frozenset(
    (int, bool, str, bytes, complex, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
     torch.memory_format)
)  # fmt: skip
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors, none of a user's."""
NUMBERS = (numpy.number, numpy.bool_)


@dataclass(frozen=True, slots=True)
class Held:
    """An argument that is a container, taken apart; or one to be copied whenever it is used (an array)."""

    kind: Any
    items: tuple[Any, ...]
    keys: tuple[Any, ...] = ()


def taken_apart(value: Any, foreign: list[Foreign]) -> Any:
    """An argument without its tensors; objects that are no plain values are added to ``foreign``."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return PLACE
    if isinstance(value, (tuple, list)):
        return Held(kind, tuple(taken_apart(item, foreign) for item in value))
    if kind is dict:
        return Held(kind, tuple(taken_apart(item, foreign) for item in value.values()), tuple(value))
    if kind is slice:
        return Held(kind, tuple(taken_apart(item, foreign) for item in (value.start, value.stop, value.step)))
    if isinstance(value, BUFFERS):
        return Held(BUFFERS, (copied(value),))
    if kind in ATOMS or kind is float or isinstance(value, (torch.Generator, *NUMBERS)):
        return value
    foreign.append(Foreign(value))
    return foreign[-1]


def filled(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The argument again, with the next of ``tensors`` at every place."""
    if template is PLACE:
        return next(tensors)
    if type(template) is Foreign:
        return template()
    if type(template) is not Held:
        return template
    kind = template.kind
    if kind is BUFFERS:
        return copied(template.items[0])
    items = [filled(item, tensors) for item in template.items]
    if kind is list:
        return items
    if kind is dict:
        return dict(zip(template.keys, items, strict=True))
    if kind is slice:
        return slice(*items)
    if issubclass(kind, tuple) and getattr(kind, "_fields", None) is not None:
        return kind(*items)
    return kind(items)


def alike(templates: Iterable[Any], values: Iterable[Any], tensors: list[torch.Tensor]) -> bool:
    """Whether arguments, of which there are as many, have these templates, and for tensors none of a user's class;
    the tensors are added to ``tensors`` in order."""
    for template, value in zip(templates, values, strict=True):
        if template is PLACE:
            if type(value) not in PLAIN:
                return False
            tensors.append(value)
        elif template is not value and not _equal(template, value, tensors):
            return False
    return True


def _equal(template: Any, value: Any, tensors: list[torch.Tensor]) -> bool:
    kind = type(value)
    if type(template) is Held:
        if kind is not template.kind:
            return False
        if kind is slice:
            return alike(template.items, (value.start, value.stop, value.step), tensors)
        if kind is dict:
            return template.keys == tuple(value) and alike(template.items, value.values(), tensors)
        return len(template.items) == len(value) and alike(template.items, value, tensors)
    if kind is not type(template):
        return False
    if kind is float:
        return bool(template == value) and math.copysign(1.0, template) == math.copysign(1.0, value)
    return kind in ATOMS and kind is not complex and bool(template == value)
