"""The C library's heap: from where on freed memory is the system's. Elsewhere than with glibc it does as it likes."""

import platform

from tapestream.system.library import function

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt's parameters in malloc.h


def has_thresholds() -> bool:
    """Whether the heap is glibc's, which has them."""
    return platform.libc_ver()[0] == "glibc" and function("mallopt") is not None


def set_thresholds(trim: int, own: int) -> None:
    """See mallopt(3): free bytes at the heap's end, and sizes from which memory has pages of its own. Nothing happens
    where there are none."""
    mallopt = function("mallopt")
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, trim)
        mallopt(_MMAP_THRESHOLD, own)


def trim() -> None:
    """Give free bytes at the heap's end back to the system, where the library can."""
    malloc_trim = function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)
