"""The C library's heap: from where on freed memory is the system's. Elsewhere than with glibc it does as it likes."""

import ctypes
import platform

import psutil

from tapestream.system.library import function

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt's parameters in malloc.h
_COUNTS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _HeapCounts(ctypes.Structure):
    """What ``mallinfo2`` returns, see mallinfo(3)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _COUNTS)
    hblkhd: int
    uordblks: int


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


def live_nbytes() -> int | None:
    """Bytes that the heap has given to this process and not got back, tensors in RAM among them. None where the library
    does not say: it is not glibc, or one before 2.33."""
    mallinfo2 = function("mallinfo2")
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _HeapCounts  # type: ignore[attr-defined]
    counts: _HeapCounts = mallinfo2()  # type: ignore[assignment]
    return counts.uordblks + counts.hblkhd


def resident_nbytes() -> int:
    """Bytes of RAM that this process takes."""
    return int(psutil.Process().memory_info().rss)
