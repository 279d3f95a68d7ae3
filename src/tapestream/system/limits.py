"""What the system allows this process: memory, and how far its stack may grow.

Limits on a process, and on a group of them, are Linux's; elsewhere there are none to keep to, and none can be set.
"""

import contextlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil

from tapestream.errors import InputError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_GROUP = "/sys/fs/cgroup"


def available_nbytes() -> int:
    """Bytes of RAM that this process could still take: what is available, within the limits of its control group and
    its own (``RLIMIT_DATA``, ``RLIMIT_AS``)."""
    return min((int(psutil.virtual_memory().available), *_below_own_limits(), *_below_group_limits()))


def total_nbytes() -> int:
    """Bytes of RAM that this machine has."""
    return int(psutil.virtual_memory().total)


def _below_own_limits() -> Iterator[int]:
    if resource is None or sys.platform != "linux":
        return
    for limit, counted in ((resource.RLIMIT_DATA, "data"), (resource.RLIMIT_AS, "vms")):
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY:  # which is rare, and what is taken is slow to read
            yield max(0, allowed - getattr(psutil.Process().memory_info(), counted))


def _below_group_limits() -> Iterator[int]:
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            with open(f"{_GROUP}/{limit}", "rb") as allowing, open(f"{_GROUP}/{used}", "rb") as taking:
                allowed, taken = allowing.read().strip(), taking.read().strip()
        except OSError:
            continue
        if allowed.isdigit() and taken.isdigit():
            yield max(0, int(allowed) - int(taken))


def data_can_be_limited() -> bool:
    """Whether the system can forbid this process to take more memory."""
    return resource is not None and sys.platform == "linux"


def limit_data(nbytes: int) -> None:
    """Forbid this process, for good, to take more private writable memory. Raises InputError where that can't be."""
    if resource is None or not data_can_be_limited():
        raise InputError("a hard limit on a process's memory was asked for, which only Linux has; run without it")
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes,) * 2)


def data_nbytes() -> int:
    """What such a limit counts: private writable memory of this process. Elsewhere what it takes of RAM."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def stack_may_grow(nbytes: int) -> bool:
    """Whether the stack of Linux's main thread, which grows as it is used, may become so large, from now on. Stacks of
    other systems have the size that they begin with."""
    if resource is None or sys.platform != "linux":
        return False
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    enough, possible = (n == resource.RLIM_INFINITY or n >= nbytes for n in (soft, hard))
    if not possible or not _nothing_below(nbytes):
        return False
    if not enough:
        resource.setrlimit(resource.RLIMIT_STACK, (nbytes, hard))
    return True


def _nothing_below(nbytes: int) -> bool:
    """Whether nothing else lies where the stack is to grow."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        ends = [(line.split()[0].split("-")[1], line.split()[0], line.endswith("[stack]")) for line in lines]
        for (below, _, _), (end, _, is_stack) in pairwise(ends):
            if is_stack:
                return int(end, 16) - int(below, 16) > nbytes
    return False
