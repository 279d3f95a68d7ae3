"""How much memory is free now, where the user gives no budget."""

import os

import torch

from tapestream.accelerator import memory
from tapestream.accelerator.device import is_accelerator
from tapestream.costs import Budget
from tapestream.system.limits import available_nbytes

_SHARE = 0.95
_HOST_SHARE = 0.8


def free_nbytes(device: torch.device, ranks: int = 1) -> int:
    """Bytes free on ``device`` now, less 5%; on the CPU, for each of so many ``ranks`` that share its memory.

    On an accelerator: what PyTorch's allocator holds unused is free, too. On the CPU: of the lesser of available memory
    and the control group's limit.
    """
    if is_accelerator(device):
        memory.workspaces_nbytes(device)  # taken first
        return int(memory.free_nbytes(device) * _SHARE)
    return int(host_nbytes() * _SHARE) // ranks


def host_nbytes() -> int:
    """Bytes of RAM that this process could still take: what is available, within the limits of its control group and
    its own (``RLIMIT_DATA``, ``RLIMIT_AS``)."""
    return available_nbytes()


def ranks_here() -> int:
    """How many ranks this machine has, as torchrun says (``LOCAL_WORLD_SIZE``); 1 where nothing does. They share its
    RAM, and what is free on the CPU."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def host_limit(budget: Budget, ranks: int = 1) -> int:
    """Bytes of RAM that block values and buffers on their way may take: given, or 80% of what is available, of which
    so many ``ranks`` of one machine have an equal share each."""
    return int(host_nbytes() * _HOST_SHARE) // ranks if budget.host_nbytes is None else budget.host_nbytes
