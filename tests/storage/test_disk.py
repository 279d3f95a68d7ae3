"""Files as a tier: bytes survive, folders are private and locked, and every failure is named."""

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tapestream.errors import InputError, StorageError
from tapestream.storage import DiskFolder, Extent, slabs
from tapestream.storage.slabs import SMALL_NBYTES
from tapestream.storage.transfer import aligned_empty


def random_bytes(nbytes, aligned=True, seed=0):
    memory = aligned_empty(nbytes) if aligned else torch.empty(nbytes + 1, dtype=torch.uint8)[1:]
    return memory.random_(generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def folder(tmp_path, request):
    folder = DiskFolder(tmp_path / "scratch", direct=request.param)
    yield folder
    folder.close()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000, 5 * 2**20 + 17, 17 * 2**20])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_bytes_survive(folder, nbytes, aligned):
    extent, memory = folder.allocate(nbytes), random_bytes(nbytes, aligned)
    extent.write_from(memory)
    back = random_bytes(nbytes, not aligned, seed=1)
    extent.read_into(back)
    assert torch.equal(back, memory)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4096), (4096, 8192), (4096, 100), (5, 9000), (12288, 7712)])
def test_a_part_is_written_and_nothing_else(folder, offset, nbytes):
    extent, memory = folder.allocate(20_000), random_bytes(20_000)
    extent.write_from(memory)
    part = random_bytes(nbytes, seed=1)
    extent.write_from(part, offset=offset)
    expected = memory.clone()
    expected[offset : offset + nbytes] = part
    back = torch.empty(20_000, dtype=torch.uint8)
    extent.read_into(back)
    assert torch.equal(back, expected)
    piece = torch.zeros(nbytes + 10, dtype=torch.uint8)
    extent.read_into(piece, offset=offset, nbytes=nbytes)
    assert torch.equal(piece[:nbytes], part)
    assert not piece[nbytes:].any()


def test_tensors_of_any_type_go_through(folder):
    values = torch.randn(3, 5, 7, dtype=torch.float64)
    extent, back = folder.allocate(values.nbytes), torch.empty_like(values)
    extent.write_from(values)
    extent.read_into(back)
    assert torch.equal(back, values)


@pytest.mark.parametrize(
    ("tensor", "options"),
    [
        (torch.empty(8193, dtype=torch.uint8), {}),
        (torch.empty(100, dtype=torch.uint8), {"offset": 8192}),
        (torch.empty(100, dtype=torch.uint8), {"offset": -1}),
        (torch.empty(100, dtype=torch.uint8), {"nbytes": 101}),
        (torch.empty(10, 10, dtype=torch.uint8).t(), {}),
        (torch.empty(10, device="meta"), {}),
    ],
)
def test_impossible_transfers_are_refused(folder, tensor, options):
    extent = folder.allocate(8192)
    with pytest.raises(InputError, match="cannot read"):
        extent.read_into(tensor, **options)


def test_mapping_and_transfers_see_the_same_bytes(folder):
    nbytes = 2**20
    extent = folder.allocate(nbytes)
    mapping = extent.map()
    assert mapping.data_ptr() % 4096 == 0
    assert mapping.numel() == nbytes
    back = aligned_empty(nbytes)
    for round_ in range(20):
        first, second = random_bytes(nbytes, seed=2 * round_), random_bytes(nbytes, seed=2 * round_ + 1)
        mapping.copy_(first)
        extent.read_into(back)
        assert torch.equal(back, first), round_
        extent.write_from(second)
        assert torch.equal(mapping, second), round_
        mapping[5] = 77  # one dirty page, then a transfer around the others
        extent.read_into(back)
        assert back[5] == 77


def test_what_a_dropped_mapping_wrote_is_read(folder):
    extent = folder.allocate(10_000)
    mapping = extent.map()
    assert extent.mapped
    assert extent.map().data_ptr() == mapping.data_ptr()
    mapping.fill_(9)
    extent.flush()
    mapping.fill_(7)
    del mapping
    assert not extent.mapped
    back = aligned_empty(10_000)
    extent.read_into(back)
    assert bool((back == 7).all())


def test_folders_are_private_unique_and_removed(tmp_path):
    first, second = DiskFolder(tmp_path / "a" / "b"), DiskFolder(tmp_path / "a" / "b")
    assert first.path != second.path
    extent = first.allocate(10)
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert stat.S_IMODE(extent.path.stat().st_mode) == 0o600
    assert json.loads((first.path / "lock").read_text()) == {"pid": os.getpid()}
    theirs = tmp_path / "a" / "b" / "user.txt"
    theirs.write_text("kept")
    first.close()
    first.close()
    second.close()
    assert list((tmp_path / "a" / "b").iterdir()) == [theirs]
    with pytest.raises(StorageError, match="removed while in use"):
        extent.read_into(torch.empty(10, dtype=torch.uint8))


def test_a_dropped_folder_removes_its_files(tmp_path):
    DiskFolder(tmp_path).allocate(10)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_the_files_alone(tmp_path):
    folder = DiskFolder(tmp_path)
    extent = folder.allocate(4096)
    child = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path / "own")], capture_output=True, text=True, timeout=60
    )
    assert child.stdout.split() == ["True"], child.stderr
    assert extent.path.exists()
    folder.close()


FORK = """
import os, sys
from tapestream.storage import DiskFolder
folder = DiskFolder(sys.argv[1])
pid = os.fork()
if pid == 0:
    folder.close()
    os._exit(0)
os.waitpid(pid, 0)
print(folder.path.exists())
"""


def test_what_forked_children_move_is_their_own(tmp_path):
    """The buffer that unaligned memory goes through had pages that a parent and its children shared: children that ran
    at once found bytes of each other's in half of what they read."""
    child = subprocess.run(
        [sys.executable, "-c", FORK_TWICE, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert sorted(child.stdout.split()) == ["0:0", "1:0", "parent:0"], child.stdout + child.stderr


FORK_TWICE = """
import os, sys
import torch
from tapestream.storage import DiskFolder

def wrong(name, times):
    extent, found = DiskFolder(sys.argv[1]).allocate(12288), 0
    unaligned, back = (torch.empty(12289, dtype=torch.uint8)[1:] for _ in range(2))
    for turn in range(times):
        extent.write_from(unaligned.fill_(100 * name + turn % 100))
        extent.read_into(back)
        found += not torch.equal(unaligned, back)
    return found

print(f"parent:{wrong(2, 3)}", flush=True)
children = []
for name in range(2):
    child = os.fork()
    if child == 0:
        print(f"{name}:{wrong(name, 2000)}", flush=True)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""

HOLD = """
import sys
from tapestream.storage import DiskFolder
folder = DiskFolder(sys.argv[1])
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_live_run_is_refused_and_that_of_a_dead_one_is_not(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        path = child.stdout.readline().strip()
        with pytest.raises(StorageError, match=f"process {child.pid}.*give the folder above"):
            DiskFolder(path)
        DiskFolder(tmp_path).close()  # beside it there is room
        child.send_signal(signal.SIGKILL)
        child.wait()
        DiskFolder(path).close()
        child.stdin.close()


def test_more_than_the_disk_holds_is_refused_at_once(folder):
    with pytest.raises(StorageError, match=rf"{2**60} bytes.*bytes are free.*make room"):
        folder.allocate(2**60)
    check_usable(folder)


LIMITED = """
import resource, sys
from tapestream.errors import StorageError
from tapestream.storage import DiskFolder
import torch
folder = DiskFolder(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
try:
    folder.allocate(2**20 + 1)
except StorageError as error:
    print(error)
extent = folder.allocate(2**20)
extent.write_from(torch.full((2**20,), 5, dtype=torch.uint8))
print(extent.map().sum().item())
print([path.stat().st_size for path in folder.path.iterdir() if path.name != "lock"])
"""


def test_a_refused_reservation_leaves_no_file(tmp_path):
    child = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    message, total, files = child.stdout.splitlines()
    assert "could not reserve 1.00 MiB (1048577 bytes)" in message
    assert "File too large" in message
    assert "bytes are free" in message
    assert total == str(5 * 2**20)
    assert files == f"[{2**20}]"


def test_a_full_disk_during_reservation(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match=r"No space left on device.*make room"):
            folder.allocate(4096)
    check_usable(folder)


@pytest.mark.parametrize("aligned", [True, False])
def test_a_file_cut_short(folder, aligned):
    extent = folder.allocate(16384)
    for length in (0, 4096, 5000):
        os.truncate(extent.path, length)
        with pytest.raises(StorageError, match=f"ended after {length} bytes"):
            extent.read_into(random_bytes(16384, aligned))
    check_usable(folder)


def test_a_failed_write(folder, monkeypatch):
    extent = folder.allocate(8192)

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", broken)
        with pytest.raises(StorageError, match=r"could not write 8.00 KiB.*Input/output error"):
            extent.write_from(random_bytes(8192))
    extent.write_from(random_bytes(8192))


def test_short_calls_are_continued(folder, monkeypatch):
    extent, memory, calls = folder.allocate(40_000), random_bytes(40_000), []
    read, write = os.preadv, os.pwritev

    def short(call):
        def shortened(file, buffers, offset):
            calls.append(offset)
            return call(file, [buffers[0][:4096]], offset)

        return shortened

    monkeypatch.setattr(os, "preadv", short(read))
    monkeypatch.setattr(os, "pwritev", short(write))
    extent.write_from(memory)
    back = random_bytes(40_000, aligned=False, seed=1)
    extent.read_into(back)
    assert torch.equal(back, memory)
    assert len(calls) == 20


def test_signals_do_not_cut_transfers(folder):
    extent, memory, hits = folder.allocate(2**22), random_bytes(2**22), []
    before = signal.signal(signal.SIGUSR1, lambda *_: hits.append(1))
    stop = threading.Event()

    def shoot():
        while not stop.wait(0.0005):
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=shoot)
    thread.start()
    try:
        for _ in range(20):
            extent.write_from(memory)
            back = aligned_empty(2**22)
            extent.read_into(back)
            assert torch.equal(back, memory)
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert hits


def test_a_folder_that_cannot_be_made_was_not_removed():
    with pytest.raises(StorageError, match="writing is not permitted; choose another folder"):
        DiskFolder("/proc/tapestream")


def test_a_folder_deleted_while_in_use(tmp_path):
    folder = DiskFolder(tmp_path)
    small, large = folder.allocate(8192), folder.allocate(SMALL_NBYTES + 1)
    for path in folder.path.iterdir():
        path.unlink()
    folder.path.rmdir()
    with pytest.raises(StorageError, match="removed while in use"):
        large.write_from(torch.zeros(10, dtype=torch.uint8))
    with pytest.raises(StorageError, match="removed while in use"):
        folder.allocate(SMALL_NBYTES)
    memory, back = random_bytes(8192), aligned_empty(8192)
    small.write_from(memory)  # in a file that is open, and so outlives its name
    small.read_into(back)
    assert torch.equal(back, memory)
    folder.close()
    with pytest.raises(StorageError, match="removed while in use"):
        small.read_into(back)


def test_small_extents_share_files_and_never_bytes(folder):
    """Random sizes come and go; what lives keeps its bytes, and all files go with the last."""
    chance = random.Random(0)
    living: list[tuple[Extent, torch.Tensor]] = []
    for round_ in range(300):
        if living and chance.random() < 0.4:
            extent, memory = living.pop(chance.randrange(len(living)))
            back = torch.empty_like(memory)
            extent.read_into(back)
            assert torch.equal(back, memory)
            extent.delete()
        else:
            extent = folder.allocate(nbytes := chance.randint(1, 100_000))
            living.append((extent, random_bytes(nbytes, round_ % 2 == 0, seed=round_)))
            extent.write_from(living[-1][1])
    files = [path for path in folder.path.iterdir() if path.name != "lock"]
    assert len(files) < len(living) / 10
    for extent, memory in living:
        assert torch.equal(extent.map(), memory)
        extent.delete()
    folder.allocate(1).delete()  # takes back what mappings held
    assert [path.name for path in folder.path.iterdir()] == ["lock"]


def test_pages_of_64_kib_where_a_grown_file_has_no_room(folder, monkeypatch):
    """Such a machine maps from multiples of them alone."""
    monkeypatch.setattr(slabs, "UNIT", 2**16)
    reserve = DiskFolder._reserve

    def tight(folder, nbytes, asked):
        if nbytes > 2**16:
            raise StorageError("no room for more than is asked for")
        return reserve(folder, nbytes, asked)

    monkeypatch.setattr(DiskFolder, "_reserve", tight)
    first, second = folder.allocate(5000), folder.allocate(5000)
    assert (first.path, first._start) != (second.path, second._start)
    memories = [random_bytes(5000, seed=n) for n in range(2)]
    for extent, memory in zip((first, second), memories, strict=True):
        extent.write_from(memory)
    for extent, memory in zip((first, second), memories, strict=True):
        assert torch.equal(extent.map(), memory)
        extent.delete()
    folder.allocate(1).delete()
    assert [path.name for path in folder.path.iterdir()] == ["lock"]


def test_the_bytes_of_a_mapped_extent_are_nobody_elses(folder):
    extent = folder.allocate(8192)
    mapping = extent.map().fill_(7)
    extent.delete()
    for _ in range(200):
        folder.allocate(8192).write_from(random_bytes(8192))
    assert bool((mapping == 7).all())


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another folder"):
        DiskFolder(tmp_path / "file")


def check_usable(folder):
    memory = random_bytes(8192)
    extent = folder.allocate(8192)
    extent.write_from(memory)
    assert torch.equal(extent.map(), memory)


USED_MEMORY = """
import ctypes, re, torch
from pathlib import Path
from tapestream.storage.transfer import aligned_empty
libc = ctypes.CDLL(None)
libc.mallopt(-4, 0)  # M_MMAP_MAX: no mappings of their own,
libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: and nothing goes back to the system
used = torch.ones(2**24)
address = used.data_ptr()
del used
memory = aligned_empty(2**25).fill_(1)
assert address <= memory.data_ptr() < address + 2**26, "malloc has not given the same memory again"
for line in Path("/proc/self/smaps").read_text().splitlines():
    if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
        first, last = (int(text, 16) for text in found.groups())
    elif line.startswith("AnonHugePages:") and first <= memory.data_ptr() + 2**24 < last:
        print(int(line.split()[1]) * 1024)
"""


def _large_pages_on_advice():
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.exists() and "[never]" not in path.read_text()


@pytest.mark.skipif(not _large_pages_on_advice(), reason="the system has no large pages to give")
def test_memory_that_was_used_before_is_of_large_pages_again():
    # A disk fills scattered small pages at half the speed.
    child = subprocess.run([sys.executable, "-c", USED_MEMORY], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) >= 2**24, "most of it should lie in large pages"
