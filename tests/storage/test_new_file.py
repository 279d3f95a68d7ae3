"""A file written in the background, past the page cache, is the file that was asked for, or an error."""

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tapestream.errors import StorageError
from tapestream.storage.new_file import new_file

MIB = 2**20


def data(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))


def failing(number: int) -> Callable[..., None]:
    def call(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    return call


def write(path: Path, pieces: list[torch.Tensor], nbytes: int = 0) -> None:
    with new_file(path, nbytes) as file:
        for piece in pieces:
            copy = piece.clone()
            file.write(copy)
            copy.zero_()  # it was taken, or copied


@pytest.mark.parametrize("sizes", [
    [], [0], [1], [4096], [4095, 1, 5000], [4 * MIB], [4 * MIB - 1, 1, 1], [3 * MIB] * 9 + [77], [17 * MIB + 3]
])  # fmt: skip
def test_a_file_has_the_bytes_that_were_added(sizes: list[int], tmp_path: Path) -> None:
    pieces = [data(size) for size in sizes]
    write(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(piece.numpy().tobytes() for piece in pieces)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("sizes", [[1], [16 * MIB], [15 * MIB, 2 * MIB, 16 * MIB - 1], [33 * MIB, 7, 40 * MIB]])
def test_one_that_is_to_be_large_is_written_in_larger_pieces(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, found = os.pwritev, []
    monkeypatch.setattr(os, "pwritev", lambda file, data, at: found.append(len(data[0])) or real(file, data, at))
    pieces = [data(size) for size in sizes]
    write(tmp_path / "file", pieces, 512 * MIB)
    assert (tmp_path / "file").read_bytes() == b"".join(piece.numpy().tobytes() for piece in pieces)
    assert [nbytes for nbytes in found if nbytes >= 8 * MIB] == [8 * MIB] * (sum(sizes) // (8 * MIB))


def test_a_file_system_that_refuses_direct_transfers_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.pwritev, []

    def picky(file: int, buffers: list[memoryview], at: int) -> int:
        (memory,) = buffers
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(memory))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, [memory[: 1 + len(memory) // 2]], at)  # and takes less than it is given

    monkeypatch.setattr(os, "pwritev", picky)
    pieces = [data(9 * MIB), data(10)]
    write(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(piece.numpy().tobytes() for piece in pieces)
    assert len(refused) <= 2  # two are under way at once


@pytest.mark.parametrize("after", [0, 4 * MIB, 20 * MIB])
def test_a_failure_is_told_wherever_it_happens(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, done, lock = os.pwritev, 0, threading.Lock()

    def full(file: int, buffers: list[memoryview], at: int) -> int:
        nonlocal done
        with lock:
            if done + len(buffers[0]) > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += len(buffers[0])
        return real(file, buffers, at)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match=r"could not write .*file: No space left on device"):
        write(tmp_path / "file", [data(5 * MIB)] * 5)


def test_a_disk_without_room_says_so_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(StorageError, match=r"could not write .*file: No space left"), new_file(tmp_path / "file", MIB):
        pytest.fail("it went on")


def test_a_file_system_that_cannot_reserve_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    piece = data(9 * MIB + 5)
    write(tmp_path / "file", [piece], 20 * MIB)
    assert (tmp_path / "file").read_bytes() == piece.numpy().tobytes()


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="File exists"), new_file(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"
