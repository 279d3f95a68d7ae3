"""The C library's heap where memory is scarce: what is freed goes back to the system at once.

glibc gives a large tensor pages of its own, which go when it does; but from what size on, grows up to 32 MiB with what
a program frees. Smaller ones then lie in a heap that shrinks at its end only, where a small object that stays between
two tensors keeps the bytes of the first. 25,000 layers moved to disk one after the other held 1,604 MiB in the end, all
that had ever been theirs, and hold 86 MiB with this; a GPT that trained from disk in 48 MiB took 183 MiB more than
before its first step with thresholds of 32 and 64 MiB, and takes 59. See mallopt(3).

Each such tensor costs a page fault per 4 KiB: up to a sixth of a step that never leaves RAM (ResNet-110, measured), a
quarter of one of a Llama from disk on 8 x 512 tokens (1.1 million faults). So this is for moving blocks home, and for
training from a disk below RAM where RAM is scarce (`scarce`). Elsewhere a tape's worth of freed memory stays at hand.
Thresholds that the environment sets (``MALLOC_MMAP_THRESHOLD_`` and its like, ``GLIBC_TUNABLES=glibc.malloc...``) are
the user's, and nothing is done; nor is it with another C library.
"""

import os

from tapestream.system import heap as system

_LEAN = 65536, 65536  # bytes: beyond them free memory at the heap's end, and each tensor, are the system's
_LARGEST = 64 * 2**20, 32 * 2**20  # bytes: what glibc lets both grow to by itself on 64 bits
_MOST = 2**31 - 1  # mallopt takes an int
_MUCH = 4  # a heap that keeps what is freed took 3.8 times a budget of 48 MiB, see above
_SET_OUTSIDE = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def free_at_once() -> None:
    """From now on tensors of 64 KiB and more in RAM have pages of their own, and freed bytes are the system's."""
    if _adjustable():
        _set(*_LEAN)


def keep_freed(nbytes: int = 0) -> None:
    """From now on freed memory stays at hand: ``nbytes`` at the heap's end, and at least the 64 MiB up to which glibc
    itself would go. Both thresholds are fixed then: after `free_at_once` it adjusts them no more."""
    if _adjustable():
        trim, own = _LARGEST
        _set(min(max(trim, nbytes), _MOST), own)
        system.trim()


def scarce(nbytes: int | None, free: int) -> bool:
    """Whether a computation within ``nbytes`` (None: all that there is) should give back at once what it frees, with
    ``free`` bytes of RAM for the process."""
    return nbytes is None or _MUCH * nbytes > free


def _adjustable() -> bool:
    """Whether the heap is glibc's, with the thresholds that it sets itself."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    fixed = "glibc.malloc." in tunables or any(name in os.environ for name in _SET_OUTSIDE)
    return system.has_thresholds() and not fixed


def _set(trim: int, own: int) -> None:
    system.set_thresholds(trim, own)
