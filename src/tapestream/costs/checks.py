"""Figures that people give: numbers of bytes and of seconds, named where they are wrong."""

from math import inf
from numbers import Integral, Real
from typing import Any

from tapestream.errors import InputError


def whole(owner: str, name: str, value: Any, least: int = 0) -> None:
    """``value`` is a whole number of at least ``least``. Raises InputError that names it where it is not."""
    if type(value) is int and value >= least:
        return  # the usual case, quickly: a chain may have a million stages
    if not _is(value, Integral) or not value >= least:
        raise InputError(f"{owner}: {name} must be at least {least}, a whole number, not {value!r}")


def duration(owner: str, name: str, value: Any) -> None:
    """``value`` is a number of seconds. Raises InputError for negative, infinite and other values."""
    if type(value) is float and 0.0 <= value < inf:
        return
    if not _is(value, Real) or not 0 <= value < inf:
        raise InputError(f"{owner}: {name} must be at least 0, a finite number, not {value!r}")


def speed(owner: str, name: str, value: Any) -> None:
    """``value`` is so much per second, above 0. Raises InputError for infinite and other values."""
    if not _is(value, Real) or not 0 < value < inf:
        raise InputError(f"{owner}: {name} must be positive, a finite number, not {value!r}")


def _is(value: object, kind: type) -> bool:
    """Whether ``value`` is a number of that kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)
