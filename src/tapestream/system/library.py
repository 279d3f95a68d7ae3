"""Functions of the C library that Python has no names for."""

import ctypes
from collections.abc import Callable
from functools import cache


@cache
def function(name: str) -> Callable[..., int] | None:
    """The function of this name, with `ctypes.get_errno` behind it; None where the C library lacks it, or (on Windows)
    is none that can be asked."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name, None)
    except (OSError, TypeError):
        return None
