"""How deep a graph may be that Python looks at.

PyTorch frees a graph node by node, but one whose nodes Python has seen by recursion: some hundred bytes of stack for
each (measured with 2.13: 8 MiB are too few for 35,000), and where the stack ends, so does the process.
"""

import contextlib
import sys
import threading
from itertools import pairwise
from pathlib import Path

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.errors import GradientError

SHALLOW = 20_000
"""Nodes that any thread's stack has room for."""
_DEEP, _STACK_NBYTES = 250_000, 2**27
"""Nodes that a larger stack has room for, and how large that is."""


def deeper(nodes: int) -> int:
    """``nodes`` of a graph have been seen, as many as may be: how many may be when the stack has grown.

    Raises GradientError where it cannot grow any more.
    """
    if nodes < _DEEP and threading.current_thread() is threading.main_thread() and _allowed():
        return _DEEP
    hint = "" if nodes >= _DEEP else " (in Linux's main thread ten times as many are possible)"
    raise _too_deep(nodes, hint)


def check_depth(nodes: int, device: torch.device) -> None:
    """Raise GradientError where a graph of ``nodes`` may be looked at here, but not where its recompute will be: on an
    accelerator, autograd has a thread of its own."""
    if nodes > SHALLOW and is_accelerator(device):
        raise _too_deep(SHALLOW, f" (on {device}, backward runs in a thread whose stack does not grow)")


def _too_deep(nodes: int, hint: str) -> GradientError:
    return GradientError(
        f"one stage, step, block or opaque module builds a graph of more than {nodes} operations, which PyTorch cannot "
        "free once it has been looked at; cut it into several, or call it within a ts.Program, whose graphs may be of "
        f"any size{hint}"
    )


def _allowed() -> bool:
    """Whether the stack of Linux's main thread, which grows as it is used, may become so large, from now on."""
    if sys.platform != "linux":
        return False
    import resource  # not everywhere

    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    enough, possible = (n == resource.RLIM_INFINITY or n >= _STACK_NBYTES for n in (soft, hard))
    if not possible or not _nothing_below():
        return False
    if not enough:
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_NBYTES, hard))
    return True


def _nothing_below() -> bool:
    """Whether nothing else lies where the stack is to grow."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        ends = [(line.split()[0].split("-")[1], line.split()[0], line.endswith("[stack]")) for line in lines]
        for (below, _, _), (end, _, is_stack) in pairwise(ends):
            if is_stack:
                return int(end, 16) - int(below, 16) > _STACK_NBYTES
    return False
