"""The pool: exact accounting, reuse, limits."""

import contextlib
import gc
import itertools
import os
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.errors import BudgetError, InputError, StorageError
from tapestream.ir import MEMORIES, Tier
from tapestream.storage import DiskFolder, Pool, page_locked
from tapestream.storage.meter import track_memory
from tapestream.storage.regions import settle_uses

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    folder = DiskFolder(tmp_path)
    yield folder
    folder.close()


def make(folder=None, **limits):
    return Pool(CPU, folder=folder, limits={Tier[name]: limit for name, limit in limits.items()}, pin=False)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_001, 2**22, 2**22 + 1])
def test_memory_is_exact_and_aligned_and_takes_what_is_said(tier, nbytes):
    pool = make()
    with track_memory() as meter:
        region = pool.allocate(tier, nbytes)
    assert meter.end_nbytes == nbytes + 4096 * (nbytes > 2**22)
    assert region.memory.dtype == torch.uint8
    assert region.memory.shape == (nbytes,)
    assert region.memory.data_ptr() % (4096 if nbytes > 2**22 else 64) == 0
    assert (region.tier, region.nbytes, region.extent) == (tier, nbytes, None)
    with pytest.raises(TypeError):
        _ = region.file


def test_disk_regions_are_files(folder):
    pool = make(folder)
    region = pool.allocate(Tier.DISK, 5000)
    assert region.tensor is None
    assert region.file.nbytes == 5000
    with pytest.raises(TypeError):
        _ = region.memory
    pool.release(region)
    assert region.file.path.exists()
    pool.trim(Tier.DISK)
    assert not region.file.path.exists()


def test_disk_without_a_folder_is_refused():
    with pytest.raises(InputError, match="folder="):
        make().allocate(Tier.DISK, 1)


@pytest.mark.parametrize("tier", list(MEMORIES))
def test_a_released_region_serves_the_next_request_of_its_size(folder, tier):
    pool = make(folder)
    region = pool.allocate(tier, 8192)
    pool.release(region)
    assert region.generation == 1
    assert pool.allocate(tier, 8192) is region
    assert pool.allocate(tier, 8192) is not region


def test_a_mapped_extent_is_not_reused(folder):
    pool = make(folder)
    region = pool.allocate(Tier.DISK, 8192)
    mapping = region.file.map().fill_(3)
    pool.release(region)
    other = pool.allocate(Tier.DISK, 8192)
    other.file.write_from(torch.zeros(8192, dtype=torch.uint8))
    assert other is not region
    assert bool((mapping == 3).all())


def test_released_memory_really_goes():
    pool = make()
    freed = []
    for other_size in (False, True):
        region = pool.allocate(Tier.DEVICE, 8192)
        weakref.finalize(region.tensor, freed.append, other_size)
        pool.release(region)
        del region
        gc.collect()
        assert freed == ([False] if other_size else [])  # it waits for reuse
        pool.allocate(Tier.DEVICE, 4096) if other_size else pool.trim()
    assert freed == [False, True]


def test_limits(folder):
    for tier in MEMORIES:
        pool = make(folder, **{tier.name: 10_000})
        kept = [pool.allocate(tier, 4096), pool.allocate(tier, 4096)]
        with pytest.raises(BudgetError, match=f"4096 bytes.*{tier.name}.*8192 bytes are held.*10000 allowed.*12288"):
            pool.allocate(tier, 4096)
        pool.allocate(tier, 1808)
        assert pool.held_nbytes(tier) == 10_000
        pool.release(kept.pop())
        pool.allocate(tier, 4000)  # the released one of another size makes way
        assert pool.held_nbytes(tier) == 9904
        if tier is Tier.DISK:
            assert folder.allocate(4096).path == kept[0].extent.path  # and its bytes can be used
        pool.close()


def test_released_regions_of_other_sizes_make_room_on_a_full_disk(folder, monkeypatch):
    size, pool = 16 * 2**20, make(folder)
    room = os.statvfs(folder.path)

    def small(_):
        used = sum(file.stat().st_size for file in folder.path.glob("extent-*"))
        return os.statvfs_result((*room[:4], (size - used) // room[1], *room[5:]))

    monkeypatch.setattr(os, "statvfs", small)
    pool.release(pool.allocate(Tier.DISK, 9 * 2**20))
    held = pool.allocate(Tier.DISK, 10 * 2**20)
    with pytest.raises(StorageError, match="No space left"):
        pool.allocate(Tier.DISK, 9 * 2**20)
    pool.release(held)


def test_memory_that_the_system_refuses():
    pool = make()
    with pytest.raises(StorageError, match=r"DEVICE.*was refused"):
        pool.allocate(Tier.DEVICE, 2**60)
    assert pool.held_nbytes(Tier.DEVICE) == 0
    pool.allocate(Tier.DEVICE, 10)


def test_regions_are_released_once_and_to_their_pool():
    pool, other = make(), make()
    region = pool.allocate(Tier.DEVICE, 10)
    with pytest.raises(StorageError, match="not in use"):
        other.release(region)
    pool.release(region)
    with pytest.raises(StorageError, match="not in use"):
        pool.release(region)


def test_a_forgotten_region_belongs_to_its_tensors():
    pool = make()
    region = pool.allocate(Tier.DEVICE, 4096)
    tensor = region.memory.fill_(4)
    pool.forget(region)
    assert pool.held_nbytes(Tier.DEVICE) == 0
    assert pool.allocate(Tier.DEVICE, 4096).memory.data_ptr() != tensor.data_ptr()
    with pytest.raises(StorageError, match="cannot be left"):
        pool.forget(region)
    with pytest.raises(StorageError, match="cannot be left"):
        pool.forget(pool.allocate(Tier.HOST, 10))


def test_close_gives_everything_back(folder):
    pool = make(folder)
    used, idle = pool.allocate(Tier.DISK, 10), pool.allocate(Tier.DISK, 20)
    pool.release(idle)
    pool.close()
    pool.close()
    assert [path.name for path in folder.path.iterdir()] == ["lock"]
    assert used.generation == 1
    assert pool.held_nbytes(Tier.DISK) == 0
    with pytest.raises(StorageError, match="closed"):
        pool.allocate(Tier.DEVICE, 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([Tier.DEVICE, Tier.HOST]), st.integers(-3, 5)), max_size=40))
def test_accounts_agree_with_a_naive_count(steps):
    pool = make()
    live, peak = {Tier.DEVICE: [], Tier.HOST: []}, dict.fromkeys(Tier, 0)
    for tier, size in steps:
        if size >= 0:
            live[tier].append(pool.allocate(tier, size * 100))
        elif live[tier]:
            pool.release(live[tier].pop(size % len(live[tier])))
        held = sum(region.nbytes for region in live[tier])
        peak[tier] = max(peak[tier], held)
        assert pool.held_nbytes(tier) == held
        assert pool.peak_nbytes(tier) == peak[tier]
        starts = sorted((r.memory.data_ptr(), r.nbytes) for regions in live.values() for r in regions if r.nbytes)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(starts))
    pool.reset_peak()
    assert pool.peak_nbytes(Tier.DEVICE) == pool.held_nbytes(Tier.DEVICE)


GPU = torch.device("cuda")  # HOST regions alone are asked for: none is needed


def test_a_refused_page_lock_is_reported_once(monkeypatch):
    monkeypatch.setattr(page_locked, "page_lock", lambda memory, device: 2)
    pool = Pool(GPU, folder=None, limits={}, pin=True)
    with pytest.warns(UserWarning, match=r"refused to page-lock 2.00 MiB \(CUDA error 2\)"):
        first = pool.allocate(Tier.HOST, 8192)
    second = pool.allocate(Tier.HOST, 8192)  # warnings are errors here, so a second report would fail
    assert first.memory.data_ptr() != second.memory.data_ptr()
    pool.release(first)
    pool.trim()
    assert pool.held_nbytes(Tier.HOST) == 8192
    pool.close()


@pytest.fixture
def locked(monkeypatch):
    """Sizes of what is page-locked, by address; a runtime stands behind it that accepts what CUDA's would."""
    found = {}

    def lock(memory, device):
        assert memory.data_ptr() % 4096 == 0
        assert not any(
            at < memory.data_ptr() + memory.numel() and memory.data_ptr() < at + n for at, n in found.items()
        )
        found[memory.data_ptr()] = memory.numel()
        return 0

    monkeypatch.setattr(page_locked, "page_lock", lock)
    monkeypatch.setattr(page_locked, "page_unlock", lambda address, device: found.pop(address))
    monkeypatch.setattr(page_locked, "synchronize", lambda device: None)
    return found


class LateCopy:
    """A copy that happens when somebody waits for it; ``log`` learns of that."""

    def __init__(self, number, log):
        self.number, self.log = number, log

    def happened(self):
        return self.number in self.log

    def settle(self):
        self.log.append(self.number)


def test_page_locked_bytes_serve_requests_of_any_size(locked):
    pool = Pool(GPU, folder=None, limits={}, pin=True)
    regions = [pool.allocate(Tier.HOST, 100_000 + k) for k in range(8)]
    assert all(region.memory.data_ptr() % 4096 == 0 for region in regions)
    for region in regions:
        pool.release(region)
    before = dict(locked)
    for nbytes in range(90_000, 140_000, 777):  # a new length each step
        together = [pool.allocate(Tier.HOST, nbytes) for _ in range(4)]
        spans = sorted((r.memory.data_ptr(), r.nbytes) for r in together)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        for region in together:
            pool.release(region)
    assert locked == before
    pool.close()
    assert locked == {}


def test_slabs_are_few_and_hardly_larger_than_what_is_in_use(locked):
    pool = Pool(GPU, folder=None, limits={}, pin=True)
    held = [pool.allocate(Tier.HOST, 2**20) for _ in range(64)]
    assert len(locked) < 16
    assert sum(locked.values()) <= 1.5 * 64 * 2**20
    large = pool.allocate(Tier.HOST, 2**30)  # what is large is locked as it is
    assert sum(locked.values()) <= 1.5 * 64 * 2**20 + 2**30
    for region in (*held, large):
        pool.release(region)
    pool.trim(Tier.HOST)
    assert locked == {}


def test_within_a_limit_slabs_are_given_up_once_the_device_has_done(locked):
    log = []
    pool = Pool(GPU, folder=None, limits={Tier.HOST: 40_960}, pin=True)
    region = pool.allocate(Tier.HOST, 20_480)
    region.uses["stream"] = LateCopy(1, log)
    pool.release(region)
    pool.trim()
    assert sum(locked.values()) <= 40_960
    assert log == []
    pool.allocate(Tier.HOST, 40_960)
    assert sum(locked.values()) == 40_960
    pool.close()
    assert locked == {}


def test_whoever_gets_the_bytes_next_knows_of_copies_under_way(locked):
    log = []
    pool = Pool(GPU, folder=None, limits={}, pin=True)
    first, second = pool.allocate(Tier.HOST, 8192), pool.allocate(Tier.HOST, 8192)
    first.uses["up"], second.uses["up"], second.uses["down"] = LateCopy(1, log), LateCopy(2, log), LateCopy(3, log)
    pool.release(first)
    pool.release(second)
    both = pool.allocate(Tier.HOST, 16_384)
    assert {key: use.number for key, use in both.uses.items()} == {"up": 2, "down": 3}  # a stream's last is enough
    settle_uses(both.uses)
    pool.release(both)
    other = pool.allocate(Tier.HOST, 4096)
    assert other.memory.data_ptr() == both.memory.data_ptr()
    pool.close()
    assert set(log) == {2, 3}


def test_a_forked_child_unlocks_no_pages_and_waits_for_no_copies(locked):
    log = []
    pool = Pool(GPU, folder=None, limits={}, pin=True)
    other = Pool(GPU, folder=None, limits={}, pin=True)
    region = pool.allocate(Tier.HOST, 8192)
    region.uses["up"] = LateCopy(1, log)
    other.allocate(Tier.HOST, 8192)
    child = os.fork()
    if not child:  # a DataLoader's worker, say, in which the model is dropped
        failed = 1
        with contextlib.suppress(BaseException):
            pool.close()
            del other
            gc.collect()
            failed = int(len(locked) != 2 or log != [])
        os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()
    assert (len(locked), log) == (1, [1])


def test_pieces_in_use_that_leave_no_room_are_said(locked):
    pool = Pool(GPU, folder=None, limits={Tier.HOST: 10 * 2**20}, pin=True)
    held = [pool.allocate(Tier.HOST, 2**20) for _ in range(10)]
    for region in held[::2]:
        pool.release(region)  # 5 MiB are free, in pieces
    with pytest.warns(UserWarning, match="are free in gaps too small to use"):
        pool.allocate(Tier.HOST, 3 * 2**20)
    pool.close()


def test_a_dropped_pool_unlocks_its_memory(locked):
    region = Pool(GPU, folder=None, limits={}, pin=True).allocate(Tier.HOST, 5000)
    gc.collect()
    assert locked == {}
    assert region.memory.numel() == 5000


def test_pools_beside_each_other_share_a_limit():
    one = Pool(CPU, folder=None, limits={Tier.HOST: 1000}, pin=False)
    other = Pool(CPU, folder=None, limits={Tier.HOST: 1000}, pin=False, beside=one)
    region = one.allocate(Tier.HOST, 700)
    with pytest.raises(BudgetError, match="700 bytes are held and 1000 allowed; a limit of 1100 bytes would do"):
        other.allocate(Tier.HOST, 400)
    other.allocate(Tier.HOST, 300)
    assert (one.held_nbytes(Tier.HOST), other.held_nbytes(Tier.HOST)) == (700, 300)
    assert one.peak_nbytes(Tier.HOST) == other.peak_nbytes(Tier.HOST) == 1000
    one.release(region)
    assert one.allocate(Tier.HOST, 700) is region  # it waited, and counts for nobody but its pool
    one.release(region)
    other.allocate(Tier.HOST, 600)  # 1600 with what waits: that goes
    assert one.allocate(Tier.HOST, 100) is not region
    other.reset_peak()
    assert one.peak_nbytes(Tier.HOST) == 1000
    other.close()
    assert one.allocate(Tier.HOST, 900).nbytes == 900
