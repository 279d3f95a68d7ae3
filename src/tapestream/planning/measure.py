"""`measure_machine`: the rates that planning needs, measured where they will be used.

Every rate is the median over copies of 8 MiB (disk) or 64 MiB (page-locked host memory). Disks are read and written
past the page cache if the filesystem allows it, in one direction alone and in both at once. Files that were written
before are overwritten, as a pool does in every step after the first. A disk with a cache larger than two seconds can
fill looks faster than it is in the long run. What a copy costs the computing thread is the thread's processor time: the
median over states of 64 KiB that go to disk and come back as those of a chain do. If a training step waits for the
answer, a few copies of 2 MiB (32 MiB of host memory) are enough: plans change with rates that are wrong by half, not by
a tenth.
"""

import errno
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Self

import torch
from torch import nn

from tapestream.accelerator.device import is_accelerator, is_present, name_of
from tapestream.accelerator.streams import current_stream, event_after, new_stream, on_stream, synchronize
from tapestream.costs import Link, Machine
from tapestream.errors import InputError, StorageError
from tapestream.executor.engines import make_engine
from tapestream.executor.travel.parcel import Parcels
from tapestream.ir import Kind, Tier, Value
from tapestream.storage import DiskFolder, Pool
from tapestream.system import files
from tapestream.system.pages import own_pages
from tapestream.units import format_nbytes

_PAGE_NBYTES = 4096
_MOST_CHUNKS = 32
_LEAST_SAMPLES = 3
_SMALLEST_PRODUCT, _LARGEST_PRODUCT, _LONG_PRODUCT_SECONDS = 512, 4096, 2e-3
_ELEMENTWISE_NBYTES, _SMALL, _UPDATED = 64 * 2**20, 32, 2**23
_TRIPS, _STATE_NBYTES, _CACHES_NBYTES = 32, 2**16, 8 * 2**20


@dataclass(frozen=True, slots=True)
class _Effort:
    """``seconds`` of each single measurement (a few samples always); bytes of a disk's chunk, of a copy to the GPU."""

    seconds: float
    chunk_nbytes: int
    copy_nbytes: int


_THOROUGH = _Effort(0.3, 8 * 2**20, 64 * 2**20)
_QUICK = _Effort(0.01, 2 * 2**20, 32 * 2**20)


def measure_machine(
    device: str | torch.device = "cpu",
    folder: str | os.PathLike[str] | None = None,
    *,
    quick: bool = False,
    within_nbytes: int | None = None,
) -> Machine:
    """Rates and latencies of every link below ``device``, and how fast it computes (float32 FLOP/s of matrix products,
    bytes a second of elementwise operations, seconds to start an operation, parameters a second that AdamW updates in
    RAM below an accelerator), in about three seconds.

    ``folder``: an existing folder on the disk to measure (None: the system's temporary folder). At most 512 MiB are
    written there, in files that are gone even if the process is killed (except 1 MiB, which the next run removes).
    ``quick``: the links alone, in about a tenth of a second, with at most 128 MiB written (12 MiB if 2 MiB take longer
    than 3 ms). ``within_nbytes``: the links alone, in so many bytes of an accelerator's memory. On "cpu" the links join
    DISK and DEVICE; on an accelerator DISK and HOST, HOST and DEVICE. Raises InputError for a missing folder or another
    kind of device, StorageError if the folder cannot be written or is full.
    """
    effort = _QUICK if quick else _THOROUGH
    device = torch.device(device)
    if device.type == "meta":
        raise InputError("measure_machine: 'meta' has no memory; devices are 'cpu', 'cuda' and other accelerators")
    if not is_present(device):
        raise InputError(f"measure_machine: {device} was asked for, but PyTorch finds no such device; use device='cpu'")
    place = Path(tempfile.gettempdir() if folder is None else folder)
    if not place.is_dir():
        raise InputError(f"measure_machine: no folder {place}; create it or give another")
    read, write = _disk_links(place, effort)
    if not is_accelerator(device):
        read, write = _with_busy(read, write, place, effort)
        links = {(Tier.DISK, Tier.DEVICE): read, (Tier.DEVICE, Tier.DISK): write}
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    else:
        up, down = _accelerator_links(device, effort, within_nbytes)
        links = {
            (Tier.DISK, Tier.HOST): read, (Tier.HOST, Tier.DISK): write,
            (Tier.HOST, Tier.DEVICE): up, (Tier.DEVICE, Tier.HOST): down,
        }  # fmt: skip
        name = name_of(device)
    alone = quick or within_nbytes is not None
    if alone:
        return Machine(links, name=name)
    return Machine(
        links, _flops_per_second(device, effort), name, _memory_bytes_per_second(device, effort),
        _launch_seconds(device, effort),
        host_updates_per_second=_host_updates_per_second(effort) if is_accelerator(device) else None,
    )  # fmt: skip


def _samples(action: Callable[[int], object], effort: _Effort, most: int | None = None) -> list[float]:
    """Seconds of each ``action(0)``, ``action(1)``, .. until time is up (but a few always) or ``most`` are done."""
    seconds: list[float] = []
    now = time.perf_counter()
    end = now + effort.seconds
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

    def __init__(self, folder: Path, effort: _Effort) -> None:
        self.folder, self._effort = folder, effort
        self.chunks, self._chunk_nbytes = 0, effort.chunk_nbytes
        self._buffer = own_pages(self._chunk_nbytes)
        # Zeros would be compressed away by some filesystems; a step waits for this, and need not for the kernel's own.
        self._buffer[:] = random.Random(0).randbytes(self._chunk_nbytes)
        try:
            self._file, self._direct = files.open_nameless(folder, "tapestream-measure-")
        except OSError as error:
            raise StorageError(error.errno, f"measure_machine: cannot write in {folder}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def fill(self) -> None:
        """Write new chunks until time is up; later writes go over them."""
        self.chunks = len(_samples(self._write, self._effort, _MOST_CHUNKS))

    def overwrite(self, index: int, nbytes: int | None = None) -> None:
        self._write(index % self.chunks, nbytes)

    def read(self, index: int, nbytes: int | None = None) -> None:
        nbytes = nbytes or self._chunk_nbytes
        offset = index % self.chunks * self._chunk_nbytes
        if not self._direct:
            files.forget_cached(self._file, offset, nbytes)
        with memoryview(self._buffer) as view:
            done = files.read_into(self._file, view[:nbytes], offset)
        if done != nbytes:
            raise StorageError(
                errno.EIO, f"measure_machine: {self.folder} gave {done} of {nbytes} bytes; try another disk"
            )

    def _write(self, index: int, nbytes: int | None = None) -> None:
        nbytes = nbytes or self._chunk_nbytes
        try:
            with memoryview(self._buffer) as view:
                done = files.write_from(self._file, view[:nbytes], index * self._chunk_nbytes)
            if not self._direct:
                files.sync_data(self._file)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(
                    error.errno, f"measure_machine: writing in {self.folder}: {error.strerror}"
                ) from error
            raise self._full() from error
        if done != nbytes:  # a nearly full disk takes a part
            raise self._full()

    def _full(self) -> StorageError:
        return StorageError(
            errno.ENOSPC,
            f"measure_machine: {self.folder} is full: {format_nbytes(files.free_nbytes(self.folder))} are free and "
            f"{format_nbytes(2 * _LEAST_SAMPLES * self._chunk_nbytes)} to "
            f"{format_nbytes(2 * _MOST_CHUNKS * self._chunk_nbytes)} are needed for a moment; "
            "free some or give another folder",
        )


def _disk_links(folder: Path, effort: _Effort) -> tuple[Link, Link]:
    """The links that read from and write to ``folder``."""
    nbytes = effort.chunk_nbytes
    with ExitStack() as stack:
        source, target = (stack.enter_context(_Scratch(folder, effort)) for _ in range(2))
        source.fill()
        target.fill()
        read, write = (_rate(_samples(action, effort), nbytes) for action in (source.read, target.overwrite))
        read_latency, write_latency = (
            median(_samples(partial(action, nbytes=_PAGE_NBYTES), effort, most=32))
            for action in (source.read, target.overwrite)
        )
        with ThreadPoolExecutor(1) as other:
            writing = other.submit(_samples, target.overwrite, effort)
            mixed_read = _rate(_samples(source.read, effort), nbytes)
            mixed_write = _rate(writing.result(), nbytes)
    return Link(read, read_latency, min(read, mixed_read)), Link(write, write_latency, min(write, mixed_write))


def _with_busy(read: Link, write: Link, folder: Path, effort: _Effort) -> tuple[Link, Link]:
    """The links with the processor time that one state costs the computing thread, on its way out and back, where
    something else has been computed since the last one: the caches have forgotten how."""
    other = torch.ones(_CACHES_NBYTES, dtype=torch.uint8, device="cpu")
    out: list[float] = []
    back: list[float] = []
    value = Value(Kind.STATE, 0)
    with closing(DiskFolder(folder)) as disk, ExitStack() as stack:
        pool = stack.enter_context(closing(Pool(torch.device("cpu"), folder=disk, limits={}, pin=False)))
        engine = stack.enter_context(closing(make_engine("threads", torch.device("cpu"))))
        parcels, end = Parcels(pool, engine), time.monotonic() + effort.seconds
        while len(out) < _TRIPS and (len(out) <= _LEAST_SAMPLES or time.monotonic() < end):
            state = torch.zeros(_STATE_NBYTES, dtype=torch.uint8, device="cpu")
            other.add_(1)
            begin = time.thread_time()
            parcels.pack(value, (state,))
            parcels.start(value, Tier.DEVICE, Tier.DISK)
            parcels.wait(value, Tier.DISK)
            out.append(time.thread_time() - begin)
            other.add_(1)
            begin = time.thread_time()
            parcels.start(value, Tier.DISK, Tier.DEVICE)
            parcels.wait(value, Tier.DEVICE)
            parcels.unpack(value)
            parcels.drop(value)
            back.append(time.thread_time() - begin)
    # The first trip makes what the next ones find: threads, a file.
    return replace(read, busy_seconds=median(back[1:])), replace(write, busy_seconds=median(out[1:]))


# ---------------------------------------------------------------------------------------------------------- device


def _multiply(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor, _: int) -> None:
    torch.mm(left, right, out=result)
    synchronize(result.device)


def _flops_per_second(device: torch.device, effort: _Effort) -> float:
    """Float32 multiplications and additions a second in a product of square matrices, as large as the device makes in a
    few milliseconds."""
    size = _SMALLEST_PRODUCT
    while True:
        left, right, result = (torch.ones(size, size, device=device) for _ in range(3))
        multiply = partial(_multiply, left, right, result)
        multiply(0)  # libraries and clocks wake up
        if size >= _LARGEST_PRODUCT or min(_samples(multiply, replace(effort, seconds=0.0))) > _LONG_PRODUCT_SECONDS:
            return 2 * size**3 / median(_samples(multiply, effort))
        size *= 2


def _memory_bytes_per_second(device: torch.device, effort: _Effort) -> float:
    """Bytes a second that a sum of two tensors reads and writes, in new memory as in a training step."""
    left, right = (torch.ones(_ELEMENTWISE_NBYTES // 4, device=device) for _ in range(2))

    def add(_: int) -> None:
        torch.add(left, right)
        synchronize(device)

    add(0)
    return _rate(_samples(add, effort), 3 * _ELEMENTWISE_NBYTES)


def _host_updates_per_second(effort: _Effort) -> float:
    """Parameters a second that torch's fused AdamW updates in RAM, more of them than caches hold."""
    parameter = nn.Parameter(torch.zeros(_UPDATED, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # makes the state
    return _rate(_samples(lambda _: optimizer.step(), effort), _UPDATED)


def _launch_seconds(device: torch.device, effort: _Effort) -> float:
    """Seconds for each operation, forward or backward, of modules so small that nothing else counts."""
    linear = partial(nn.utils.skip_init, nn.Linear, 8, 8, device=device)  # draws no random numbers
    modules = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(_SMALL)))
    for parameter in modules.parameters():
        nn.init.ones_(parameter)
    numbers = torch.ones(8, 8, device=device, requires_grad=True)

    def step(_: int) -> None:
        modules(numbers).sum().backward()
        modules.zero_grad()
        synchronize(device)

    step(0)
    # Of a linear module and its activation: two operations forward; three products and sums backward, and one more.
    return median(_samples(step, effort)) / (6 * _SMALL)


def _accelerator_links(device: torch.device, effort: _Effort, within_nbytes: int | None) -> tuple[Link, Link]:
    """The links host to device and device to host, with page-locked host memory; copies of less than ``effort`` asks
    for go to and fro one after the other where ``within_nbytes`` of the device have no room for two of that size."""
    whole = effort.copy_nbytes
    piece = whole if within_nbytes is None else max(_PAGE_NBYTES, min(whole, within_nbytes // 2))
    hosts = [torch.empty(whole, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(2)]
    devices = [torch.empty(piece, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [new_stream(device) for _ in range(2)]
    pairs = [(devices[0], hosts[0], streams[0]), (hosts[1], devices[1], streams[1])]

    def copy(_: int, ways: tuple[int, ...] = (0, 1), nbytes: int = whole) -> None:
        for way in ways:
            target, source, stream = pairs[way]
            with on_stream(stream):
                for start in range(0, nbytes, piece):
                    stop = min(piece, nbytes - start)
                    into = target[:stop] if target.numel() == piece else target[start : start + stop]
                    given = source[:stop] if source.numel() == piece else source[start : start + stop]
                    into.copy_(given, non_blocking=True)
        for way in ways:
            streams[way].synchronize()

    for stream in streams:
        stream.wait_event(event_after(current_stream(device)))
    copy(0)
    # Both copies of a pair start together; the slower one's end stands for both.
    mixed = _rate(_samples(copy, effort), whole)
    up, down = (
        Link(
            alone := _rate(_samples(partial(copy, ways=(way,)), effort), whole),
            median(_samples(partial(copy, ways=(way,), nbytes=_PAGE_NBYTES), effort, most=32)),
            min(alone, mixed),
        )
        for way in (0, 1)
    )
    return up, down
