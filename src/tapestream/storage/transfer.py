"""Bytes between memory and an open file, around the page cache where alignment allows it."""

import mmap
import os

import torch

ALIGNMENT = 4096  # what direct I/O asks of addresses, offsets and lengths on every common device
_CHUNK = 16 * 2**20  # bytes per system call: long enough to be fast, short enough to be interrupted
_STAGE = 4 * 2**20  # bytes of the aligned buffer that unaligned memory goes through


def round_up(nbytes: int, to: int = ALIGNMENT) -> int:
    """The least multiple of ``to`` that is not less than ``nbytes``."""
    return -(-nbytes // to) * to


def aligned_empty(nbytes: int) -> torch.Tensor:
    """``nbytes`` uint8 in RAM from a multiple of 4096; torch itself aligns to 64 bytes only."""
    whole = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    return whole.narrow(0, -whole.data_ptr() % ALIGNMENT, nbytes)


def move_bytes(file: int, memory: torch.Tensor, offset: int, *, write: bool, direct: bool) -> int:
    """Fill a uint8 CPU tensor from byte ``offset`` of ``file`` or write it there; returns the bytes moved.

    That is less than ``memory`` holds only when the file ends early. ``direct`` says that ``file`` was opened with
    O_DIRECT: then ``offset`` is a multiple of 4096, and the last page that is touched may be overwritten whole. The GIL
    is released, and a call that a signal interrupts starts over. Raises OSError.
    """
    call = os.pwritev if write else os.preadv
    stage = _staging(memory) if direct else None
    chunk = _CHUNK if stage is None else stage.nbytes
    done = 0
    while done < memory.nbytes:
        piece = memory[done : done + chunk]
        page = piece if stage is None else stage[: round_up(piece.nbytes)]
        if stage is not None and write:
            page[: piece.nbytes].copy_(piece)
        moved = call(file, [page.numpy().data], offset + done)
        if stage is not None and not write:
            piece.copy_(page[: piece.nbytes])
        done += min(moved, piece.nbytes)
        if moved == 0 or (direct and moved % ALIGNMENT):  # only the end of the file cuts a direct transfer so
            break
    return done


def _staging(memory: torch.Tensor) -> torch.Tensor | None:
    """A buffer for memory that direct I/O does not accept, None for memory that it does."""
    if memory.data_ptr() % ALIGNMENT == 0 and memory.nbytes % ALIGNMENT == 0:
        return None
    return torch.frombuffer(mmap.mmap(-1, min(_STAGE, round_up(memory.nbytes))), dtype=torch.uint8)
