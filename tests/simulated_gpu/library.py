"""The compiled simulator, as Python calls it."""

import ctypes
import os
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

from .build import torch_folder


class Knob(IntEnum):
    """What can be asked of the device, in the order of `csrc/knobs.h`."""

    DEVICES = 0
    MEMORY = 1
    LAG = 2
    SEED = 3
    POISON = 4
    COPY_IN = 5
    COPY_OUT = 6
    WORKSPACE = 7
    EXPANDABLE = 8
    EXPLAIN = 9


class Counter(IntEnum):
    """What the device counts, in the order of `csrc/knobs.h`."""

    JOBS = 0
    SYNCHRONISATIONS = 1
    COPIES_IN = 2
    COPIES_OUT = 3
    COPIES_WITHIN = 4
    COPIES_BETWEEN = 5
    BLOCKED_US = 6


class CardNumbers(ctypes.Structure):
    """`Card` of `csrc/clock.h`."""

    _fields_ = [
        (name, ctypes.c_double)
        for name in ("launch", "kernel", "memory", "half", "single", "full", "copy", "into", "out", "peer")
    ]


LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_INT, _LONG, _SIZE, _ADDRESS, _SECONDS, _TEXT = (
    ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_double, ctypes.c_char_p,
)  # fmt: skip
_SIGNATURES = {
    "error": (_TEXT,), "register": (_INT,), "stop": (None,),
    "set_knob": (None, _INT, _LONG), "knob": (_LONG, _INT), "counter": (_LONG, _INT),
    "synchronisations": (_TEXT,), "listen": (None, LISTENER),
    "device": (_INT,), "set_device": (_INT, _INT), "sleep": (None, _LONG),
    "pause": (None, _INT, _LONG, ctypes.c_bool), "default_generators": (None, ctypes.c_bool),
    "register_host": (_INT, _ADDRESS, _SIZE), "unregister_host": (_INT, _ADDRESS), "set_limit": (None, _INT, _SIZE),
    "memory_information": (None, _INT, ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)), "blocks": (_TEXT, _INT),
    "free_workspaces": (None,), "host_memory": (None, ctypes.POINTER(_LONG)),
    "set_clock": (None, ctypes.POINTER(CardNumbers)), "host_time": (_SECONDS,), "host_reaches": (None, _SECONDS),
    "host_works": (None, _TEXT, _SECONDS), "stream_time": (_SECONDS, _INT, _LONG),
    "hold_stream": (None, _INT, _LONG, _SECONDS), "event_time": (_SECONDS, _ADDRESS),
    "lane": (_SECONDS, _TEXT, _TEXT, _SECONDS, _SECONDS, _LONG), "record": (_TEXT,), "forget_record": (None,),
}  # fmt: skip


class Library:
    """The functions of the compiled library by name, without their prefix."""

    def __init__(self, path: Path) -> None:
        if "torch" not in sys.modules:
            _load_torch_libraries()
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(self._library, "sim_" + name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)

    def check(self, failed: int) -> None:
        """Raise RuntimeError with the library's own words if the last call failed."""
        if failed:
            raise RuntimeError(self.error().decode())


def _load_torch_libraries() -> None:
    """PyTorch looks for CUDA while it is imported: the device must be known before, and needs its libraries."""
    folder = torch_folder() / "lib"
    for pattern in ("libgomp*", "libc10.so", "libtorch_cpu.so"):
        for path in sorted(folder.glob(pattern)):
            ctypes.CDLL(os.fspath(path), mode=ctypes.RTLD_GLOBAL)
