"""How much memory is free now, where the user gives no budget."""

import torch

from tapestream.accelerator import memory
from tapestream.accelerator.device import is_accelerator
from tapestream.costs import Budget
from tapestream.system.limits import available_nbytes

_SHARE = 0.95
_HOST_SHARE = 0.8


def free_nbytes(device: torch.device) -> int:
    """Bytes free on ``device`` now, less 5%.

    On an accelerator: what PyTorch's allocator holds unused is free, too. On the CPU: of the lesser of available memory
    and the control group's limit.
    """
    if is_accelerator(device):
        memory.workspaces_nbytes(device)  # taken first
        return int(memory.free_nbytes(device) * _SHARE)
    return int(host_nbytes() * _SHARE)


def host_nbytes() -> int:
    """Bytes of RAM that this process could still take: what is available, within the limits of its control group and
    its own (``RLIMIT_DATA``, ``RLIMIT_AS``)."""
    return available_nbytes()


def host_limit(budget: Budget) -> int:
    """Bytes of RAM that block values and buffers on their way may take: given, or 80% of what is available."""
    return int(host_nbytes() * _HOST_SHARE) if budget.host_nbytes is None else budget.host_nbytes
