"""`measure_machine`: the rates that planning needs, measured where they will be used.

Every rate is the median over many copies of 8 MiB (disk) or 64 MiB (page-locked host memory). Disks are read and
written past the page cache where the filesystem allows, alone and both at once; files that were written before are
overwritten, as a pool does in every step after the first. A disk with a cache of its own, larger than what two seconds
can fill, looks faster than it is in the long run.
"""

import errno
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Self

import torch

from tapestream.costs import Link, Machine
from tapestream.errors import InputError, StorageError
from tapestream.ir import Tier
from tapestream.units import format_nbytes

_CHUNK_NBYTES = 8 * 2**20
_PAGE_NBYTES = 4096
_MOST_CHUNKS = 32  # 256 MiB a file
_SECONDS = 0.3  # of each single measurement
_LEAST_SAMPLES = 3
_COPY_NBYTES = 64 * 2**20


def measure_machine(device: str | torch.device = "cpu", folder: str | os.PathLike[str] | None = None) -> Machine:
    """Rates and latencies of every link below ``device``, and its float32 matrix-multiply FLOP/s, in about two seconds.

    ``folder``: an existing folder on the disk to measure, None for the system's temporary folder. At most 512 MiB are
    written there, in files that are gone even if the process is killed. On "cpu" the links join DISK and DEVICE, on
    CUDA DISK and HOST, HOST and DEVICE. Raises InputError for a missing folder or another kind of device,
    StorageError where the folder cannot be written or is full.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"measure_machine knows 'cpu' and 'cuda', not {str(device)!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"measure_machine: {device} was asked for, but PyTorch finds no CUDA device; use device='cpu'")
    place = Path(tempfile.gettempdir() if folder is None else folder)
    if not place.is_dir():
        raise InputError(f"measure_machine: no folder {place}; create it or give another")
    read, write = _disk_links(place)
    if device.type == "cpu":
        links = {(Tier.DISK, Tier.DEVICE): read, (Tier.DEVICE, Tier.DISK): write}
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    else:
        up, down = _cuda_links(device)
        links = {
            (Tier.DISK, Tier.HOST): read, (Tier.HOST, Tier.DISK): write,
            (Tier.HOST, Tier.DEVICE): up, (Tier.DEVICE, Tier.HOST): down,
        }  # fmt: skip
        name = torch.cuda.get_device_name(device)
    return Machine(links, _flops_per_second(device), name)


def _samples(action: Callable[[int], object], most: int | None = None) -> list[float]:
    """Seconds of each ``action(0)``, ``action(1)``, .. until time is up (but a few always) or ``most`` are done."""
    seconds: list[float] = []
    now = time.perf_counter()
    end = now + _SECONDS
    while (now < end or len(seconds) < _LEAST_SAMPLES) and (most is None or len(seconds) < most):
        begin = now
        action(len(seconds))
        now = time.perf_counter()
        seconds.append(now - begin)
    return seconds


def _rate(seconds: list[float], nbytes: int) -> float:
    return nbytes / median(seconds)


# ------------------------------------------------------------------------------------------------------------ disk


class _Scratch:
    """A nameless file of whole chunks, with a page-aligned buffer to copy from and to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chunks = 0
        self._buffer = mmap.mmap(-1, _CHUNK_NBYTES)
        self._buffer[:] = os.urandom(_CHUNK_NBYTES)  # zeros would be compressed away by some filesystems
        try:
            self._file, self._direct = _open_nameless(folder)
        except OSError as error:
            raise StorageError(error.errno, f"measure_machine: cannot write in {folder}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def fill(self) -> None:
        """Write new chunks until time is up; later writes go over them."""
        self.chunks = len(_samples(self._write, _MOST_CHUNKS))

    def overwrite(self, index: int, nbytes: int | None = None) -> None:
        self._write(index % self.chunks, nbytes)

    def read(self, index: int, nbytes: int | None = None) -> None:
        nbytes = nbytes or _CHUNK_NBYTES
        offset = index % self.chunks * _CHUNK_NBYTES
        if not self._direct:
            os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_DONTNEED)
        with memoryview(self._buffer) as view:
            done = os.preadv(self._file, [view[:nbytes]], offset)
        if done != nbytes:
            raise StorageError(
                errno.EIO, f"measure_machine: {self.folder} gave {done} of {nbytes} bytes; try another disk"
            )

    def _write(self, index: int, nbytes: int | None = None) -> None:
        nbytes = nbytes or _CHUNK_NBYTES
        try:
            with memoryview(self._buffer) as view:
                done = os.pwritev(self._file, [view[:nbytes]], index * _CHUNK_NBYTES)
            if not self._direct:
                os.fdatasync(self._file)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(
                    error.errno, f"measure_machine: writing in {self.folder}: {error.strerror}"
                ) from error
            raise self._full() from error
        if done != nbytes:  # a nearly full disk takes a part
            raise self._full()

    def _full(self) -> StorageError:
        status = os.statvfs(self.folder)
        return StorageError(
            errno.ENOSPC,
            f"measure_machine: {self.folder} is full: {format_nbytes(status.f_bavail * status.f_frsize)} are free and "
            f"{format_nbytes(2 * _LEAST_SAMPLES * _CHUNK_NBYTES)} to {format_nbytes(2 * _MOST_CHUNKS * _CHUNK_NBYTES)} "
            "are needed for a moment; free some or give another folder",
        )


def _open_nameless(folder: Path) -> tuple[int, bool]:
    """A descriptor without a name, and whether it passes the page cache by."""
    descriptor, name = tempfile.mkstemp(prefix="tapestream-measure-", dir=folder)
    try:
        direct = os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the filesystem has no direct I/O
            os.close(descriptor)
            raise
        return descriptor, False
    finally:
        os.unlink(name)
    os.close(descriptor)
    return direct, True


def _disk_links(folder: Path) -> tuple[Link, Link]:
    """The links that read from and write to ``folder``."""
    with ExitStack() as stack:
        source, target = (stack.enter_context(_Scratch(folder)) for _ in range(2))
        source.fill()
        target.fill()
        read, write = (_rate(_samples(action), _CHUNK_NBYTES) for action in (source.read, target.overwrite))
        read_latency, write_latency = (
            median(_samples(partial(action, nbytes=_PAGE_NBYTES), most=32))
            for action in (source.read, target.overwrite)
        )
        with ThreadPoolExecutor(1) as other:
            writing = other.submit(_samples, target.overwrite)
            mixed_read = _rate(_samples(source.read), _CHUNK_NBYTES)
            mixed_write = _rate(writing.result(), _CHUNK_NBYTES)
    return Link(read, read_latency, min(read, mixed_read)), Link(write, write_latency, min(write, mixed_write))


# ---------------------------------------------------------------------------------------------------------- device


def _flops_per_second(device: torch.device) -> float:
    """Float32 multiplications and additions a second in a product of square matrices."""
    size = 1024 if device.type == "cpu" else 4096
    left, right, result = (torch.ones(size, size, device=device) for _ in range(3))

    def multiply(_: int) -> None:
        torch.mm(left, right, out=result)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    multiply(0)  # libraries and clocks wake up
    return 2 * size**3 / median(_samples(multiply))


def _cuda_links(device: torch.device) -> tuple[Link, Link]:
    """The links host to device and device to host, with page-locked host memory."""
    hosts = [torch.empty(_COPY_NBYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(_COPY_NBYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    pairs = [(devices[0], hosts[0], streams[0]), (hosts[1], devices[1], streams[1])]

    def copy(_: int, ways: tuple[int, ...] = (0, 1), nbytes: int = _COPY_NBYTES) -> None:
        for way in ways:
            target, source, stream = pairs[way]
            with torch.cuda.stream(stream):
                target[:nbytes].copy_(source[:nbytes], non_blocking=True)
        for way in ways:
            streams[way].synchronize()

    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    copy(0)
    # Both copies of a pair start together; the slower one's end stands for both.
    mixed = _rate(_samples(copy), _COPY_NBYTES)
    up, down = (
        Link(
            alone := _rate(_samples(partial(copy, ways=(way,))), _COPY_NBYTES),
            median(_samples(partial(copy, ways=(way,), nbytes=_PAGE_NBYTES), most=32)),
            min(alone, mixed),
        )
        for way in (0, 1)
    )
    return up, down
