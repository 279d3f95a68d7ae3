"""Transfers at a place where the system has no call for them."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tapestream.system import files

PART = 10_000


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwritev", "posix_fallocate", "posix_fadvise", "fdatasync", "O_DIRECT"):
        monkeypatch.delattr(os, name, raising=False)


@pytest.mark.usefixtures("without")
def test_threads_that_share_a_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    parts = [bytes([number]) * PART for number in range(200)]
    file = files.open_private(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    files.reserve(file, len(parts) * PART)
    assert os.fstat(file).st_size == len(parts) * PART

    def there_and_back(number: int) -> bytes:
        assert files.write_from(file, memoryview(parts[number]), number * PART) == PART
        found = bytearray(PART)
        assert files.read_into(file, memoryview(found), number * PART) == PART
        return bytes(found)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(there_and_back, range(len(parts)))) == parts
    assert files.read_into(file, memoryview(bytearray(PART)), len(parts) * PART - 7) == 7  # where it ends
    files.forget_cached(file, 0, PART)
    files.sync_data(file)
    os.close(file)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


@pytest.mark.usefixtures("without")
def test_what_cannot_pass_the_page_cache_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        files.open_private(tmp_path / "file", os.O_RDWR | os.O_CREAT, direct=True)
    assert not list(tmp_path.iterdir())
    file, direct = files.open_nameless(tmp_path, "probe-")
    assert not direct
    files.pass_cache(file, True)
    assert not files.passes_cache(file)
    os.close(file)
    assert not list(tmp_path.iterdir())
