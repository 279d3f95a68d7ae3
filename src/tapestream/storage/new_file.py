"""`new_file`: a file written once, from front to back, while what comes next is being made."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from tapestream.errors import StorageError
from tapestream.storage.transfer import ALIGNMENT, large_pages
from tapestream.system import files

_COUNT = 4  # buffers: one is filled while two are written, and one waits
_WRITERS = 2  # a disk that writes for one thread idles until that has the processor again
_SIZE, _LARGE_SIZE = 4 << 20, 8 << 20  # bytes of a buffer; disks take larger ones faster
_LARGE_NBYTES = 512 << 20


@contextmanager
def new_file(path: Path, nbytes: int = 0) -> "Iterator[NewFile]":
    """A new private file to write, whose bytes are on the disk when the block ends: ``nbytes`` or so.

    Raises StorageError, which names the file, when it cannot be made or the disk fails.
    """
    try:
        file = files.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            if nbytes:
                files.try_to_reserve(file, nbytes)  # reserved places are written at once, others one after the other
            with ThreadPoolExecutor(_WRITERS, "tapestream-write") as threads:
                new = NewFile(file, threads, _LARGE_SIZE if nbytes >= _LARGE_NBYTES else _SIZE)
                yield new
                new.finish()
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"could not write {path}: {error.strerror or error}; what was saved before is intact"
        ) from error


class NewFile:
    """Takes bytes into buffers of its own of ``size`` bytes, and has ``threads`` write those that are full.

    Past the page cache where the file system can: that takes a fifth of the processor's time, and leaves the cache to
    what will be read again.
    """

    def __init__(self, file: int, threads: ThreadPoolExecutor, size: int) -> None:
        self._file, self._threads, self._size = file, threads, size
        self._writing: deque[Future[None]] = deque()
        self._buffers = [torch.from_numpy(large_pages(size)) for _ in range(_COUNT)]
        self._filled = self._handed = 0
        with suppress(OSError):  # not every file system has it
            files.pass_cache(file, True)

    def write(self, data: torch.Tensor) -> None:
        """Add uint8 numbers, which may change as soon as this returns. Raises OSError."""
        # By NumPy: PyTorch copies with all its threads, which wait for each other in loops beside those that write.
        done, end, numbers = 0, data.numel(), data.numpy()
        while done < end:
            count = min(end - done, self._size - self._filled)
            room = self._filling().numpy()[self._filled : self._filled + count]
            room[:] = numbers[done : done + count]
            done += count
            self._filled += count
            if self._filled == self._size:
                self._hand_over()

    def finish(self) -> None:
        """Write what is left; then nothing more may be added. Raises OSError."""
        while self._writing:
            self._writing.popleft().result()
        start, rest = self._handed * self._size, self._filling()[: self._filled]
        whole = self._filled - self._filled % ALIGNMENT
        self._write(rest[:whole], start)
        files.pass_cache(self._file, False)  # which the end of a file, seldom that of a page, cannot be
        self._write(rest[whole:], start + whole)
        os.ftruncate(self._file, start + self._filled)  # if less came than was reserved

    def _filling(self) -> torch.Tensor:
        return self._buffers[self._handed % _COUNT]

    def _hand_over(self) -> None:
        self._writing.append(self._threads.submit(self._write, self._filling(), self._handed * self._size))
        self._handed, self._filled = self._handed + 1, 0
        if len(self._writing) == _COUNT:
            self._writing.popleft().result()  # the next one to be filled

    def _write(self, data: torch.Tensor, start: int) -> None:
        rest = data.numpy().data
        while rest:
            direct = files.passes_cache(self._file)
            try:
                count = files.write_from(self._file, rest, start)
            except OSError:
                if not direct:
                    raise
                files.pass_cache(
                    self._file, False
                )  # some accept the flag and refuse the transfer, or what is left of one
            else:
                rest, start = rest[count:], start + count
