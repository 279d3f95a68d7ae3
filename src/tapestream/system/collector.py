"""Python's cycle collector, switched off for a while."""

import atexit
import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Where memory is measured inside: what the cycle collector frees in between is none of what runs. Where very many
    small objects are made: it would look at all of them again and again, for a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def never_collecting(command: Callable[P, R]) -> Callable[P, R]:
    """``command`` without the collector, for one that soon ends: neither while it runs, where PyTorch alone makes a
    million objects that stay, nor over all of them when the process ends."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        atexit.register(gc.freeze)
        with collector_off():
            return command(*args, **kwargs)

    return run
