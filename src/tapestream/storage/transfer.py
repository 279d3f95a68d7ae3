"""Bytes between memory and an open file, around the page cache where alignment allows it."""

import threading
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tapestream.system.files import read_into, write_from
from tapestream.system.pages import LARGE_PAGE, ask_for_large, ask_for_large_again, own_pages

Bytes: TypeAlias = npt.NDArray[np.uint8]
ALIGNMENT = 4096  # what direct I/O asks of addresses, offsets and lengths on every common device
SECTOR = 512  # what most devices are content with
_CHUNK = 64 * 2**20  # bytes per system call: a disk is idle between two; short enough to be interrupted
_STAGE = 4 * 2**20  # bytes of the aligned buffer that unaligned memory goes through
_TORCH_ALIGNMENT = 64  # bytes
_own = threading.local()


def round_up(nbytes: int, to: int = ALIGNMENT) -> int:
    """The least multiple of ``to`` that is not less than ``nbytes``."""
    return -(-nbytes // to) * to


def aligned_empty(nbytes: int) -> torch.Tensor:
    """``nbytes`` uint8 in RAM from a multiple of 4096; torch itself aligns to 64 bytes only."""
    whole = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
    _ask_for_large_pages(whole)
    return whole.narrow(0, -whole.data_ptr() % ALIGNMENT, nbytes)


def lean_empty(nbytes: int) -> torch.Tensor:
    """``nbytes`` uint8 in RAM, aligned for direct transfers unless they go through the buffer in one piece: the page
    that it takes to align them is in no plan, and would count beside so little."""
    return aligned_empty(nbytes) if nbytes > _STAGE else torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def landing_empty(nbytes: int) -> torch.Tensor:
    """``nbytes`` uint8 in RAM that most devices can fill directly, at most 448 bytes of it for that, in a storage that
    starts with them: programs may count on where in its storage a tensor begins."""
    if nbytes > _STAGE or nbytes % SECTOR:
        found = lean_empty(nbytes)
    else:
        whole = torch.empty(nbytes + SECTOR - _TORCH_ALIGNMENT, dtype=torch.uint8, device="cpu")
        found = whole.narrow(0, -whole.data_ptr() % SECTOR, nbytes)
    return with_storage_of_its_own(found)


def with_storage_of_its_own(memory: torch.Tensor) -> torch.Tensor:
    """The same uint8 in RAM in a storage that begins and ends with them."""
    start = memory.storage_offset()
    storage: torch.UntypedStorage = memory.untyped_storage()[start : start + memory.numel()]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between uint8 CPU tensors of one size, without the GIL, on this thread alone: torch's own copy calls for a
    team of threads, which a thread beside compute waits for."""
    np.copyto(target.numpy(), source.numpy())


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous CPU tensor. What is done with them does not go through torch, whose every call lets go
    of the GIL and then waits for it, beside a thread that computes."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1 and not tensor.requires_grad:
        return tensor.numpy()
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def move_bytes(file: int, memory: Bytes, offset: int, *, write: bool, granule: int) -> int:
    """Fill memory from byte ``offset`` of ``file`` or write it there; returns the bytes moved.

    That is less than ``memory`` holds only when the file ends early. ``granule`` is not 0 where ``file`` was opened
    with O_DIRECT: then ``offset`` is a multiple of 4096, the last page that is touched may be overwritten whole, and
    memory whose address or length is not a multiple of it goes through a buffer. The GIL is released, and a call that a
    signal interrupts starts over. Raises OSError.
    """
    call = write_from if write else read_into
    stage = _staging(memory, granule) if granule else None
    chunk = _CHUNK if stage is None else stage.nbytes
    done = 0
    while done < memory.nbytes:
        piece = memory[done : done + chunk]
        page = piece if stage is None else stage[: round_up(piece.nbytes)]
        if stage is not None and write:
            np.copyto(page[: piece.nbytes], piece)
        moved = call(file, page.data, offset + done)
        if stage is not None and not write:
            np.copyto(piece, page[: piece.nbytes])
        done += min(moved, piece.nbytes)
        if moved == 0 or (granule and moved % granule):  # only the end of the file cuts a direct transfer so
            break
    return done


def _staging(memory: Bytes, granule: int) -> Bytes | None:
    """This thread's buffer for memory that direct I/O does not accept, None for memory that it does."""
    if memory.ctypes.data % granule == 0 and memory.nbytes % granule == 0:
        return None
    if not hasattr(_own, "stage"):  # new pages would be zeroed for every transfer
        _own.stage = large_pages(_STAGE)
    stage: Bytes = _own.stage
    return stage


def large_pages(nbytes: int) -> Bytes:
    """Memory in large pages, as far as the system begins it with one, that torch does not count: for what is passed
    through."""
    found = np.frombuffer(own_pages(nbytes), dtype=np.uint8)
    ask_for_large(found.ctypes.data, nbytes)
    return found


def _ask_for_large_pages(memory: torch.Tensor) -> None:
    """Fresh memory is faulted in page by page, 4096 bytes each, which takes longer than a fast disk takes to fill it,
    and a disk takes twice as long to fill such pages as large ones.

    What malloc had given out before consists of small pages: they are let go of, with what was in them.
    """
    first = round_up(memory.data_ptr(), LARGE_PAGE)
    nbytes = (memory.data_ptr() + memory.nbytes - first) // LARGE_PAGE * LARGE_PAGE
    if nbytes > 0:
        ask_for_large_again(first, nbytes)
