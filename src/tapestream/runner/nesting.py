"""Front ends inside front ends.

The outer one's plan covers what is called inside of its stages, steps, blocks or function. What is called there runs as
the plain code that it stands for: gradients are then added in the order of plain autograd, and all that is saved is
counted once, by the outer one.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar, Token

_COVERED: ContextVar[bool] = ContextVar("tapestream_covered", default=False)


def covered() -> bool:
    """Whether a front end runs here a part of what it was given."""
    return _COVERED.get()


def cover() -> Token[bool]:
    """Make `covered` true until `uncover`."""
    return _COVERED.set(True)


def uncover(token: Token[bool]) -> None:
    """As it was before `cover`."""
    _COVERED.reset(token)


@contextlib.contextmanager
def covering() -> Iterator[None]:
    """Make `covered` true inside."""
    token = cover()
    try:
        yield
    finally:
        uncover(token)
