"""Small direct transfers that the kernel makes beside compute, without a thread of ours.

A thread of Python's needs the interpreter's lock between two calls, and gets it from the thread that computes, which
then waits to have it back, which for small transfers takes longer than moving the bytes. Linux's asynchronous I/O,
io_submit(2), needs one call to start a transfer and one to learn of its end.
"""

import ctypes
import errno
import os
import threading
import weakref
from dataclasses import dataclass
from itertools import count

import torch

from tapestream.storage.slabs import Room
from tapestream.storage.transfer import ALIGNMENT, round_up
from tapestream.system import kernel_calls
from tapestream.system.kernel_calls import Event, Order
from tapestream.system.pages import own_pages

_MOST = 64  # transfers under way
_BOUNCE_NBYTES = 4 * 2**20
_LARGEST_BOUNCE = 512 * 2**10  # bytes: to copy more here would take longer than to let a thread do it
_READ, _WRITE = 0, 1


_Addresses = ctypes.c_uint64 * 1


@dataclass(slots=True, eq=False)
class Pending:
    """A transfer under way; ``result``: bytes moved, or an error number below 0, when it is over. ``memory`` is held
    until then. ``bounce``: where its bytes lie in the queue's own memory, None where the kernel takes the caller's."""

    memory: torch.Tensor
    nbytes: int
    bounce: int | None
    write: bool
    result: int | None = None


class KernelQueue:
    """Transfers between memory and files opened with O_DIRECT; at most 64 are under way.

    What the file system does not take as it is goes through 4 MiB of the queue's own. What is under way when the
    queue goes is waited for, as its memory must not become somebody else's before. Threads may share it; a signal, or
    garbage collection that waits for another transfer, may come at any point of any method.
    """

    def __init__(self, calls: tuple[int, int, int, int]) -> None:
        self._setup, self._destroy, self._collect_number, self._submit_number = calls
        call = kernel_calls.caller()
        if call is None:
            raise OSError(errno.ENOSYS, "io_setup")
        self._call = call
        self._pending: dict[int, Pending] = {}
        self._arrived: list[ctypes.Array[Event]] = []
        self._lock = threading.RLock()
        self._numbers = count(1)
        self._context, self._owner = ctypes.c_ulong(0), os.getpid()
        if self._call(self._setup, ctypes.c_ulong(_MOST), ctypes.byref(self._context)):
            raise OSError(ctypes.get_errno(), "io_setup")
        self._room, bounce = Room(_BOUNCE_NBYTES), own_pages(_BOUNCE_NBYTES)
        self._bounce = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
        self.close = weakref.finalize(
            self, _destroy, self._call, self._destroy, self._context, self._owner, self._pending, bounce
        )

    def start(
        self, file: int, memory: torch.Tensor, nbytes: int, offset: int, *, write: bool, granule: int
    ) -> Pending | None:
        """Begin to fill the first ``nbytes`` bytes of contiguous CPU memory from byte ``offset`` of ``file``, or to
        write them there; None where the queue can't take it now. ``granule``: what addresses and lengths must be
        multiples of, or go through the queue's own memory. What is written is rounded up to whole pages, since file
        systems make others wait for each other; nothing may lie behind it."""
        address, length = memory.data_ptr(), nbytes
        straight = address % granule == 0 and nbytes % (ALIGNMENT if write else granule) == 0
        with self._lock:
            if not self._usable or len(self._pending) >= _MOST:
                return None
            bounce = None if straight or nbytes > _LARGEST_BOUNCE else self._room.take(nbytes)
            if not straight and bounce is None:
                return None
            if bounce is not None:
                if write:
                    ctypes.memmove(self._bounce + bounce, address, nbytes)
                address, length = self._bounce + bounce, round_up(nbytes)
            pending, number = Pending(memory, nbytes, bounce, write), next(self._numbers)
            order = Order(
                data=number, opcode=_WRITE if write else _READ, file=file, address=address, nbytes=length, offset=offset
            )
            orders = _Addresses(ctypes.addressof(order))
            self._pending[number] = pending  # before the kernel has it: a signal may come right after
            if self._call(self._submit_number, self._context, ctypes.c_long(1), orders) != 1:
                self._let_go(number)
                return None
            return pending

    def finish(self, pending: Pending) -> int:
        """Block, with the GIL released, until it is over; the bytes moved, or an error number below 0."""
        with self._lock:
            self._take()
            while pending.result is None:
                if not self._usable:
                    return -errno.ECANCELED
                self._arrived.append(events := (Event * _MOST)())
                one, most = ctypes.c_long(1), ctypes.c_long(_MOST)
                found = self._call(self._collect_number, self._context, one, most, events, None)
                if found < 0 and ctypes.get_errno() != errno.EINTR:
                    return -ctypes.get_errno()
                self._take()
        return min(pending.result, pending.nbytes)

    def drain(self) -> None:
        """Block until nothing is under way, whatever became of it."""
        with self._lock:
            if self._usable:  # which waits for what was begun, also where nobody was told so
                self._call(self._destroy, self._context)
                self._take()
                self._pending.clear()
                self._room = Room(_BOUNCE_NBYTES)
                self._context.value = 0
                if self._call(self._setup, ctypes.c_ulong(_MOST), ctypes.byref(self._context)):
                    self.close.detach()

    @property
    def _usable(self) -> bool:
        return self.close.alive and os.getpid() == self._owner

    def _take(self) -> None:
        """Note what has arrived; in any order, and again from the start where something came in between."""
        while self._arrived:
            events = self._arrived[-1]
            for event in events:
                if not event.data:  # the kernel fills them from the first on, and numbers begin at 1
                    break
                pending = self._pending.get(event.data)
                if pending is not None and pending.result is None:
                    if pending.bounce is not None and not pending.write:
                        ctypes.memmove(pending.memory.data_ptr(), self._bounce + pending.bounce, pending.nbytes)
                    pending.result = event.result
                self._let_go(event.data)
            self._arrived = [array for array in self._arrived if array is not events]

    def _let_go(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None and pending.bounce is not None:
            self._room.give_back(pending.bounce, pending.nbytes)


def open_queue() -> KernelQueue | None:
    """A new queue, None where the system has none to give."""
    calls = kernel_calls.numbers()
    try:
        return None if calls is None else KernelQueue(calls)
    except OSError:
        return None


def _destroy(call: object, number: int, context: ctypes.c_ulong, owner: int, *held: object) -> None:
    """Returns when nothing is under way; ``held`` is memory that must live until then."""
    if os.getpid() == owner:  # a forked child has no such context
        assert callable(call)
        call(number, context)
