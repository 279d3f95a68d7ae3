"""How much memory is free now, where the user gives no budget."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from tapestream.accelerator import memory
from tapestream.accelerator.device import is_accelerator
from tapestream.costs import Budget

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
    available = min((int(psutil.virtual_memory().available), *_below_own_limits()))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            allowed = (root / limit).read_text().strip()
            taken = (root / used).read_text().strip()
        except OSError:
            continue
        if allowed.isdigit() and taken.isdigit():
            available = min(available, max(0, int(allowed) - int(taken)))
    return available


def _below_own_limits() -> Iterator[int]:
    process = psutil.Process()
    if not hasattr(process, "rlimit"):  # Linux has it
        return
    taken = process.memory_info()
    for limit, used in ((psutil.RLIMIT_DATA, taken.data), (psutil.RLIMIT_AS, taken.vms)):
        allowed, _ = process.rlimit(limit)
        if allowed != psutil.RLIM_INFINITY:
            yield max(0, allowed - used)


def host_limit(budget: Budget) -> int:
    """Bytes of RAM that block values and buffers on their way may take: given, or 80% of what is available."""
    return int(host_nbytes() * _HOST_SHARE) if budget.host_nbytes is None else budget.host_nbytes
