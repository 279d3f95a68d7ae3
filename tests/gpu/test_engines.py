"""The cuda engine and pinned regions on a real device."""

import time

import pytest
import torch

from tapestream.errors import GradientError, InputError
from tapestream.executor.engines import make_engine
from tapestream.ir import MEMORIES, Tier
from tapestream.storage import DiskFolder, Pool

CUDA = torch.device("cuda")
NBYTES = 64 * 2**20


@pytest.fixture
def pool(tmp_path):
    folder = DiskFolder(tmp_path)
    pool = Pool(CUDA, folder=folder, limits={}, pin=True)
    yield pool
    pool.close()
    folder.close()


@pytest.fixture(params=["cuda", "adversarial"])
def engine(request):
    engine = make_engine(request.param, CUDA)
    yield engine
    engine.close()


def busy(seconds=0.1):
    """Keep the current stream busy, so that work which does not wait for it overtakes it."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def test_host_regions_are_pinned_and_their_bytes_reused(pool):
    torch.cuda.cudart()  # which may take some for itself, once
    before = torch.cuda.host_memory_stats().get("reserved_bytes.current", 0)
    region = pool.allocate(Tier.HOST, NBYTES + 4096)
    address = region.memory.data_ptr()
    assert region.memory.is_pinned()
    assert address % 4096 == 0
    pool.release(region)
    pool.trim()
    assert pool.allocate(Tier.HOST, NBYTES).memory.data_ptr() == address
    assert torch.cuda.host_memory_stats().get("reserved_bytes.current", 0) == before  # torch's allocator has no part


def test_device_regions_are_aligned_and_freed(pool):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    region = pool.allocate(Tier.DEVICE, NBYTES)
    assert region.memory.data_ptr() % 512 == 0
    assert torch.cuda.memory_allocated() == before + NBYTES
    pool.release(region)
    region.tensor = None
    pool.trim()
    assert torch.cuda.memory_allocated() == before


def test_values_survive_the_way_to_disk_and_back_while_memory_is_reused(pool, engine):
    host, back = pool.allocate(Tier.HOST, NBYTES), pool.allocate(Tier.HOST, NBYTES)
    disk = pool.allocate(Tier.DISK, NBYTES)
    device = pool.allocate(Tier.DEVICE, NBYTES)
    values = device.memory.view(torch.float32)
    for seed in range(3):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        engine.compute_begins([device])
        busy()
        values.normal_(generator=generator)
        engine.compute_ended([device])
        expected = values.clone()
        engine.wait(engine.copy(device, host))
        engine.compute_begins([device])
        values.fill_(seed)  # must not overtake the copy
        engine.compute_ended([device])
        engine.wait(engine.copy(host, disk))  # must not overtake it either
        engine.wait(engine.copy(disk, back))
        busy()
        doubled = values * 2  # reads what the next copy overwrites
        engine.wait(engine.copy(back, device))
        assert torch.equal(values, expected)
        assert bool((doubled == 2 * seed).all())


def test_compute_on_the_host_sees_the_copy(pool, engine):
    device, host = pool.allocate(Tier.DEVICE, NBYTES), pool.allocate(Tier.HOST, NBYTES)
    host.memory.zero_()
    busy()
    device.memory.fill_(7)
    engine.wait(engine.copy(device, host))
    engine.compute_begins([host])
    assert bool((host.memory == 7).all())
    engine.compute_ended([host])


def test_released_memory_is_reused_by_compute_after_the_copy(pool, engine):
    device, host = pool.allocate(Tier.DEVICE, NBYTES), pool.allocate(Tier.HOST, NBYTES)
    busy()
    device.memory.fill_(5)
    engine.wait(engine.copy(device, host))
    engine.release(device)
    pool.release(device)
    device.tensor = None
    pool.trim()
    other = torch.full((NBYTES,), 9, dtype=torch.uint8, device=CUDA)
    engine.compute_begins([host])
    assert bool((host.memory == 5).all())
    assert bool((other == 9).all())


def test_starting_and_waiting_do_not_block_the_host(pool):
    engine = make_engine("cuda", CUDA)
    device, host = pool.allocate(Tier.DEVICE, NBYTES), pool.allocate(Tier.HOST, NBYTES)
    engine.wait(engine.copy(device, host))
    torch.cuda.synchronize()
    start = time.perf_counter()
    busy(0.5)
    for _ in range(20):
        engine.wait(engine.copy(device, host))
        engine.wait(engine.copy(host, device))
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    assert issued < 0.2 < total
    assert engine.statistics().bytes_moved[Tier.DEVICE, Tier.HOST] == 21 * NBYTES
    engine.close()


def test_copies_run_beside_compute(pool):
    engine = make_engine("cuda", CUDA)
    device, host = pool.allocate(Tier.DEVICE, NBYTES), pool.allocate(Tier.HOST, NBYTES)
    done, copied = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    ticket = engine.copy(device, host)
    side = torch.cuda.Stream()
    busy(0.5)
    done.record()
    with torch.cuda.stream(side):
        engine.wait(ticket)
        copied.record()
    copied.synchronize()
    assert not done.query()
    torch.cuda.synchronize()
    engine.close()


def test_rules_hold_on_the_device_too(pool):
    engine = make_engine("cuda", CUDA)
    device, host, disk = (pool.allocate(tier, 4096) for tier in MEMORIES)
    with pytest.raises(InputError, match="DEVICE -> DISK; copy to HOST"):
        engine.copy(device, disk)
    ticket = engine.copy(device, host)
    with pytest.raises(GradientError, match="before the copy"):
        engine.compute_begins([host])
    engine.abandon()
    with pytest.raises(GradientError, match="abandoned"):
        engine.wait(ticket)
    engine.wait(engine.copy(device, host))
    engine.close()
