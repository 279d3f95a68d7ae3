"""How deep a graph may be that Python looks at.

PyTorch frees a graph node by node, but one whose nodes Python has seen by recursion: some hundred bytes of stack for
each (measured with 2.13: 8 MiB are too few for 35,000), and where the stack ends, so does the process.
"""

import threading

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.errors import GradientError
from tapestream.system.limits import stack_may_grow

SHALLOW = 20_000
"""Nodes that any thread's stack has room for."""
_DEEP, _STACK_NBYTES = 250_000, 2**27
"""Nodes that a larger stack has room for, and how large that is."""


def deeper(nodes: int) -> int:
    """``nodes`` of a graph have been seen, as many as may be: how many may be when the stack has grown.

    Raises GradientError where it cannot grow any more.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if nodes < _DEEP and in_main and stack_may_grow(_STACK_NBYTES):
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
        f"one stage, step, block or leaf module builds a graph of more than {nodes} operations, which PyTorch cannot "
        "free after it has been searched; split it, or call it within a ts.Program, whose graphs may be of any "
        f"size{hint}"
    )
