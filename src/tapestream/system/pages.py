"""Pages of memory that malloc does not manage: this process's own, and large where the system gives them on advice.
Elsewhere fresh memory is faulted in page by page, which takes longer than a fast disk takes to fill it."""

import ctypes
import mmap

from tapestream.system.library import function

LARGE_PAGE = 2 * 2**20
"""Bytes of a large page."""


def own_pages(nbytes: int) -> mmap.mmap:
    """Zeros that no other process sees. Python's own ``mmap.mmap(-1, nbytes)`` is shared with forked children: what
    passed through it would be mixed with what passes through theirs."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, where nobody forks
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def ask_for_large(address: int, nbytes: int) -> None:
    """Have whole large pages there, from now on, where nothing has been touched yet."""
    _advise(address, nbytes, "MADV_HUGEPAGE")


def ask_for_large_again(address: int, nbytes: int) -> None:
    """As `ask_for_large`, where something has been: its small pages are let go of, with what was in them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):  # not for nothing
        _advise(address, nbytes, "MADV_DONTNEED")
        _advise(address, nbytes, "MADV_HUGEPAGE")


def _advise(address: int, nbytes: int, name: str) -> None:
    """Advice only: a system without large pages goes on as before."""
    advice, madvise = getattr(mmap, name, None), function("madvise")
    if advice is not None and madvise is not None:
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
