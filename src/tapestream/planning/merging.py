"""One value of what every rank has measured, so that all make the same plan: the largest of each number."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from tapestream.costs import Link, Machine
from tapestream.errors import InputError

T = TypeVar("T")


def leaves_of(value: Any) -> list[Any]:
    """All that JSON can say of a dataclass of numbers, in order: numbers, names, lengths of sequences."""
    found: list[Any] = []
    _collect(value, found)
    return found


def merged(value: T, every: Sequence[Sequence[Any]]) -> T:
    """``value`` with the largest of what ``every`` rank's `leaves_of` its own are. Raises InputError where more than
    numbers differs."""
    first = every[0]
    for rank, other in enumerate(every):
        if len(other) != len(first) or any(map(_is_other, first, other)):
            raise InputError(
                f"rank {rank} has run another computation than rank 0 in its profiled call ({len(first)} and "
                f"{len(other)} numbers describe them); every rank must run the same blocks in it"
            )
    found: T = _rebuilt(value, iter([one[0] if _is_said(one[0]) else max(one) for one in zip(*every, strict=True)]))
    return found


def slowest(every: Sequence[Machine]) -> Machine:
    """A machine none of whose links is faster than that of any rank, as each has measured it."""
    first = every[0]
    links = {ends: _slowest(one.links[ends] for one in every) for ends in first.links}
    peers = None if first.peers is None else _slowest(one.peers for one in every if one.peers is not None)
    return replace(first, links=links, peers=peers)


def _slowest(links: Iterator[Link]) -> Link:
    every = list(links)
    return Link(
        min(one.bytes_per_second for one in every),
        max(one.latency_seconds for one in every),
        min(one.mixed for one in every),
        max(one.busy_seconds for one in every),
    )


def _collect(value: Any, found: list[Any]) -> None:
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _collect(getattr(value, field.name), found)
    elif isinstance(value, Mapping):
        found.append(f"{len(value)} entries")
        for key in value:
            found.append(str(key))
            _collect(value[key], found)
    elif isinstance(value, Enum):
        found.append(value.name)
    elif isinstance(value, tuple | list):
        found.append(f"{len(value)} of them")
        for one in value:
            _collect(one, found)
    elif value is None or isinstance(value, bool | int | float | str):
        found.append(str(value) if _is_said(value) else value)
    else:
        raise TypeError(f"a {type(value).__name__} is no number, nor made of numbers")


def _rebuilt(value: Any, found: Iterator[Any]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        made = {field.name: _rebuilt(getattr(value, field.name), found) for field in fields(value)}
        return replace(value, **{field.name: made[field.name] for field in fields(value) if field.init})
    if isinstance(value, Mapping):
        next(found)
        return {key: _rebuilt_after(value[key], found) for key in value}
    if isinstance(value, tuple | list):
        next(found)
        return type(value)([_rebuilt(one, found) for one in value])
    said = next(found)
    return value if isinstance(value, Enum) or _is_said(value) else said


def _rebuilt_after(value: Any, found: Iterator[Any]) -> Any:
    next(found)  # the key
    return _rebuilt(value, found)


def _is_said(value: Any) -> bool:
    """Whether it must be the same on every rank."""
    return value is None or isinstance(value, bool | str | Enum)


def _is_other(one: Any, other: Any) -> bool:
    return _is_said(one) != _is_said(other) or (_is_said(one) and one != other)
