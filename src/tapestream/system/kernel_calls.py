"""Linux's asynchronous I/O, io_submit(2). Elsewhere there is none, and threads move what small transfers move."""

import ctypes
import platform
from collections.abc import Callable

from tapestream.system.library import function

_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Of io_setup, io_destroy, io_getevents and io_submit, for which the C library has no names."""


class Order(ctypes.Structure):
    """struct iocb."""

    _fields_ = [
        ("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("flags", ctypes.c_int32), ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16), ("file", ctypes.c_uint32), ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64), ("offset", ctypes.c_int64), ("rest", ctypes.c_uint64 * 2),
    ]  # fmt: skip


class Event(ctypes.Structure):
    """struct io_event."""

    _fields_ = [
        ("data", ctypes.c_uint64), ("order", ctypes.c_uint64), ("result", ctypes.c_int64), ("more", ctypes.c_int64)
    ]  # fmt: skip


def numbers() -> tuple[int, int, int, int] | None:
    """Of the four calls, None on a system that does not have them or has others."""
    return _NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None


def caller() -> Callable[..., int] | None:
    """What makes a call by its number."""
    return function("syscall")
