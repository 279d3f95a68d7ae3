"""What of an accelerator's memory is free, allocated and reserved; page-locked memory below it.

*Allocated* is what tensors take, as the caching allocator rounds it; *reserved* is what that allocator holds, free
pieces included. What the runtime itself takes (its context) is in neither.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch

from tapestream.accelerator.device import backend_of, module_of


def allocated_nbytes(device: torch.device) -> int:
    """Bytes that tensors take now."""
    return int(module_of(device).memory_allocated(device))


def peak_allocated_nbytes(device: torch.device) -> int:
    """The most since `reset_peaks`."""
    return int(module_of(device).max_memory_allocated(device))


def reserved_nbytes(device: torch.device) -> int:
    """Bytes that the caching allocator holds now."""
    return int(module_of(device).memory_reserved(device))


class AllocatorBytes(NamedTuple):
    """What the caching allocator of a device counts, in bytes. ``peak`` and ``peak_requested``: the most that tensors
    took, and had asked for, since `reset_peaks`; pieces of memory may be larger than what was asked for."""

    allocated: int
    peak: int
    peak_requested: int
    reserved: int


def allocator_bytes(device: torch.device) -> AllocatorBytes:
    """All of it as it is now."""
    # Flat names for all of it would take longer. Nothing is known before the runtime has begun, and some allocators do
    # not count what was asked for.
    found = module_of(device).memory_stats_as_nested_dict(device)
    if not found:
        return AllocatorBytes(0, 0, 0, 0)
    allocated, requested = found["allocated_bytes"]["all"], found.get("requested_bytes", {}).get("all", {})
    return AllocatorBytes(
        allocated["current"],
        allocated["peak"],
        requested.get("peak") or allocated["peak"],
        found["reserved_bytes"]["all"]["current"],
    )


def reset_peaks(device: torch.device) -> None:
    """Count peaks from now on."""
    module_of(device).reset_peak_memory_stats(device)


def free_nbytes(device: torch.device) -> int:
    """Bytes that tensors could still take: what the device has free, and what the caching allocator holds unused."""
    free, _ = module_of(device).mem_get_info(device)
    return int(free) + reserved_nbytes(device) - allocated_nbytes(device)


def total_nbytes(device: torch.device) -> int:
    """Bytes of memory that the device has."""
    _, total = module_of(device).mem_get_info(device)
    return int(total)


def empty_cache(device: torch.device) -> None:
    """Give back what the caching allocator holds unused."""
    with torch.no_grad():
        module_of(device).empty_cache()


def limit_reserved(nbytes: int, device: torch.device) -> None:
    """Have the caching allocator hold at most ``nbytes``: more is out of memory."""
    module_of(device).set_per_process_memory_fraction(min(1.0, nbytes / total_nbytes(device)), device)


@functools.cache
def workspaces_nbytes(device: torch.device) -> int:
    """Bytes of the workspaces that PyTorch's matrix products keep for good: one for each thread and stream, here for
    the calling thread and for autograd's (cuBLAS on an H100: 32 MiB each; ``CUBLAS_WORKSPACE_CONFIG`` sets it).

    They are taken now, if they were not, so that whatever is measured from now on is free of them.
    """
    if device.type != "cuda":
        return 0
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:  # what was taken before we asked would not be seen
        clear()
    before = allocated_nbytes(device)
    deterministic, only_warns = (
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    )  # fmt: skip
    torch.use_deterministic_algorithms(False)  # else products ask for a setting, and nobody needs the bits of this one
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            ones = torch.ones(16, 16, device=device, requires_grad=True)
            torch.autograd.backward(ones @ ones, torch.ones(16, 16, device=device))
            del ones
        let_go_of_backward(device)
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)
    return max(0, allocated_nbytes(device) - before)


def let_go_of_backward(device: torch.device) -> None:
    """Autograd's thread for ``device`` holds what it ran last, for a moment after the backward has returned or until
    it is given something else: give it nothing to do."""
    with torch.inference_mode(False), torch.enable_grad():
        root, cotangent = torch.empty(0, device=device, requires_grad=True), torch.empty(0, device=device)
        torch.autograd.backward(root, cotangent)


def rounded_nbytes(nbytes: int, device: torch.device) -> int:
    """Bytes that a tensor of ``nbytes`` takes on ``device``."""
    if device.type == "cpu":  # asked for everywhere
        return nbytes
    backend = backend_of(device)
    granule = 1 if backend is None else backend.granule_nbytes
    return -(-nbytes // granule) * granule


def tensor_nbytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor like this one takes on its device, with memory of its own."""
    if tensor.layout is torch.sparse_coo:  # as gradients of embeddings may be
        return tensor_nbytes(tensor._indices()) + tensor_nbytes(tensor._values())
    return tensor.nbytes if tensor.is_cpu else rounded_nbytes(tensor.nbytes, tensor.device)


def storage_nbytes(storage: torch.UntypedStorage) -> int:
    """Bytes that a storage takes on its device."""
    return rounded_nbytes(storage.nbytes(), storage.device)


def page_lock(tensor: torch.Tensor, device: torch.device) -> int:
    """Lock the pages of a CPU tensor whose bytes begin at a page; 0, or the runtime's error code.

    For backends with ``registers`` alone. The tensor must be given to `page_unlock` before its memory is freed: pages
    that are freed while locked can never be locked again.
    """
    lock: Callable[[int, int, int], int] = module_of(device).cudart().cudaHostRegister
    code = int(lock(tensor.data_ptr(), tensor.nbytes, 0))
    if code:
        with suppress(RuntimeError):  # the runtime would tell of this once more, at the next kernel
            torch.zeros(1, device=device)
    return code


def page_unlock(address: int, device: torch.device) -> None:
    """Undo `page_lock` of the tensor that begins at ``address``."""
    module_of(device).cudart().cudaHostUnregister(address)
