"""What every copy engine does alike."""

import errno
import gc
import os
import random
import threading
import time

import pytest
import torch
from engine_cases import CPU, LANES, content, fill, make_pool

from tapestream.errors import GradientError, InputError, StorageError
from tapestream.executor.engines import make_engine, threads
from tapestream.ir import MEMORIES, Tier
from tapestream.storage import DiskFolder
from tapestream.storage.kernel_queue import KernelQueue

NAMES = ["threads", "adversarial", "fake_streams"]
ALONE = "threads without the kernel's help"


@pytest.fixture
def folder(tmp_path):
    folder = DiskFolder(tmp_path)
    yield folder
    folder.close()


@pytest.fixture
def pool(folder):
    return make_pool(folder)


@pytest.fixture
def no_queue(monkeypatch):
    """As on a system without asynchronous I/O."""
    monkeypatch.setattr(threads, "open_queue", lambda: None)


@pytest.fixture(params=[*NAMES, ALONE])
def engine(request):
    if request.param == ALONE:
        request.getfixturevalue("no_queue")
    engine = make_engine("threads" if request.param == ALONE else request.param, CPU)
    yield engine
    engine.close()


def lanes_of(engine):
    return [lane for lane in LANES if engine.name != "fake_streams" or set(lane) != {Tier.DEVICE, Tier.DISK}]


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 2**20 + 5])
def test_bytes_arrive(engine, pool, nbytes):
    for number, (source_tier, target_tier) in enumerate(lanes_of(engine)):
        source, target = pool.allocate(source_tier, nbytes), pool.allocate(target_tier, nbytes)
        values = fill(source, number)
        engine.wait(engine.copy(source, target))
        engine.compute_begins([target])
        assert torch.equal(content(target), values)
        assert torch.equal(content(source), values)
        engine.compute_ended([target])


def test_a_part_is_copied_and_the_rest_stays(engine, pool):
    source, target = pool.allocate(Tier.HOST, 8192), pool.allocate(Tier.DISK, 12288)
    values, before = fill(source, 0), fill(target, 1)
    engine.wait(engine.copy(source, target, 5000))
    assert torch.equal(content(target), torch.cat([values[:5000], before[5000:]]))


def test_a_chain_of_copies_through_every_tier(engine, pool):
    first, host, disk = (pool.allocate(tier, 70_000) for tier in MEMORIES)
    back, last = pool.allocate(Tier.HOST, 70_000), pool.allocate(Tier.DEVICE, 70_000)
    for seed in range(3):
        values = fill(first, seed)
        engine.compute_begins([first])
        engine.compute_ended([first])
        for source, target in [(first, host), (host, disk), (disk, back), (back, last)]:
            engine.wait(engine.copy(source, target))
        engine.compute_begins([last])
        assert torch.equal(content(last), values)
        engine.compute_ended([last])


def test_many_copies_in_flight_end_in_any_order_of_waiting(engine, pool):
    rng = random.Random(0)
    pairs = []
    for seed in range(60):
        source_tier, target_tier = rng.choice(lanes_of(engine))
        source, target = pool.allocate(source_tier, 9000), pool.allocate(target_tier, 9000)
        pairs.append((fill(source, seed), source, target))
    tickets = [engine.copy(source, target) for _, source, target in pairs]
    rng.shuffle(tickets)
    for ticket in tickets:
        engine.wait(ticket)
    for values, _, target in pairs:
        assert torch.equal(content(target), values)


def test_statistics_count_bytes_by_lane(engine, pool):
    host, disk = pool.allocate(Tier.HOST, 4096), pool.allocate(Tier.DISK, 4096)
    for nbytes in (None, 100, 0):
        engine.wait(engine.copy(host, disk, nbytes))
    engine.wait(engine.copy(disk, host, 50))
    statistics = engine.statistics()
    assert statistics.bytes_moved == {(Tier.HOST, Tier.DISK): 4196, (Tier.DISK, Tier.HOST): 50}
    assert statistics.copies == 4
    assert statistics.wait_seconds >= 0


@pytest.mark.parametrize("nbytes", [4097, -1])
def test_copies_beyond_a_region_are_refused(engine, pool, nbytes):
    host, disk = pool.allocate(Tier.HOST, 8192), pool.allocate(Tier.DISK, 4096)
    with pytest.raises(InputError, match="cannot copy"):
        engine.copy(host, disk, nbytes)
    with pytest.raises(InputError, match="cannot copy"):
        engine.copy(host, disk)


def test_what_is_in_flight_must_be_waited_for(engine, pool):
    host, disk, other = pool.allocate(Tier.HOST, 64), pool.allocate(Tier.DISK, 64), pool.allocate(Tier.HOST, 64)
    fill(host, 0)
    ticket = engine.copy(host, disk)
    with pytest.raises(GradientError, match="before the copy HOST -> DISK of 64 bytes has arrived"):
        engine.compute_begins([disk])
    with pytest.raises(GradientError, match="before the copy"):
        engine.copy(disk, other)
    with pytest.raises(GradientError, match="before the copy"):
        engine.release(disk)
    with pytest.raises(GradientError, match="while a copy still reads it"):
        engine.release(host)
    with pytest.raises(GradientError, match="while a copy still reads it"):
        engine.copy(other, host)
    engine.compute_begins([host])  # reading a source is allowed
    engine.compute_ended([host])
    engine.wait(ticket)
    with pytest.raises(GradientError, match="not in flight"):
        engine.wait(ticket)
    for region in (host, disk):
        engine.release(region)
        pool.release(region)


def test_a_region_released_in_flight_is_found_at_wait(engine, pool):
    host, disk = pool.allocate(Tier.HOST, 64), pool.allocate(Tier.DISK, 64)
    fill(host, 0)
    ticket = engine.copy(host, disk)
    pool.release(host)  # past the engine, which would have refused
    assert pool.allocate(Tier.HOST, 64) is host
    with pytest.raises(GradientError, match="was released while in flight"):
        engine.wait(ticket)
    engine.abandon()


def broken(*_):
    raise OSError(errno.EIO, "Input/output error")


def test_a_failed_copy_raises_at_wait_and_the_engine_goes_on(engine, pool, monkeypatch):
    host, disk, back = pool.allocate(Tier.HOST, 8192), pool.allocate(Tier.DISK, 8192), pool.allocate(Tier.HOST, 8192)
    values = fill(host, 0)
    fill(disk, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        patch.setattr(KernelQueue, "finish", lambda queue, pending: -errno.EIO)
        with pytest.raises(StorageError, match="Input/output error"):
            engine.wait(engine.copy(disk, back))
    engine.abandon()
    engine.wait(engine.copy(host, disk))
    engine.wait(engine.copy(disk, back))
    assert torch.equal(content(back), values)


@pytest.mark.parametrize("abandoned", [False, True])
def test_whoever_waits_for_a_failed_copy_once_more_is_told_why(engine, pool, monkeypatch, abandoned):
    disk, back = pool.allocate(Tier.DISK, 8192), pool.allocate(Tier.HOST, 8192)
    early = engine.copy(disk, back) if engine.name == "adversarial" else None  # reads the disk as a copy begins, too
    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setattr(KernelQueue, "finish", lambda queue, pending: -errno.EIO)
    ticket = early or engine.copy(disk, back)
    with pytest.raises(StorageError, match="Input/output error") as first:
        engine.wait(ticket)
    if abandoned:
        engine.abandon()
    with pytest.raises(StorageError) as second:
        engine.wait(ticket)
    assert str(second.value) == str(first.value)


def test_a_file_cut_short_raises_at_wait(engine, pool):
    disk, back = pool.allocate(Tier.DISK, 8192), pool.allocate(Tier.HOST, 8192)
    with pytest.raises(StorageError, match="ended after 5000 bytes"):
        truncate_and_read(engine, disk, back)
    engine.abandon()


def truncate_and_read(engine, disk, back):
    os.truncate(disk.file.path, 5000)
    engine.wait(engine.copy(disk, back))


def test_abandoned_tickets_are_void_and_the_engine_goes_on(engine, pool):
    regions = [(pool.allocate(Tier.HOST, 2**20), pool.allocate(Tier.DISK, 2**20)) for _ in range(10)]
    values = [fill(source, seed) for seed, (source, _) in enumerate(regions)]
    tickets = [engine.copy(source, target) for source, target in regions]
    device, host = pool.allocate(Tier.DEVICE, 64), pool.allocate(Tier.HOST, 64)
    tickets.append(engine.copy(device, host))
    engine.abandon()
    for ticket in tickets:
        with pytest.raises(GradientError, match="abandoned"):
            engine.wait(ticket)
    engine.abandon()
    for source, target in regions:
        engine.wait(engine.copy(source, target))
    assert all(torch.equal(content(target), value) for (_, target), value in zip(regions, values, strict=True))
    for region in (device, host, *regions[0]):
        engine.release(region)
        pool.release(region)


def test_names():
    assert make_engine("auto", CPU).name == "threads"
    assert make_engine("auto", torch.device("cuda")).name == "cuda"
    assert [make_engine(name, CPU).name for name in NAMES] == NAMES
    with pytest.raises(InputError, match=r"'warp'; there are 'auto'"):
        make_engine("warp", CPU)
    with pytest.raises(InputError, match="'cuda' does not support the device cpu"):
        make_engine("cuda", CPU)
    for name in ("threads", "fake_streams"):
        with pytest.raises(InputError, match=f"'{name}' does not support the device cuda"):
            make_engine(name, torch.device("cuda"))


def test_what_the_kernel_did_in_part_is_done_again(pool, monkeypatch):
    engine = make_engine("threads", CPU)
    host, disk, back = pool.allocate(Tier.HOST, 8192), pool.allocate(Tier.DISK, 8192), pool.allocate(Tier.HOST, 8192)
    values = fill(host, 0)
    fill(disk, 1)
    finish = KernelQueue.finish
    monkeypatch.setattr(KernelQueue, "finish", lambda queue, pending: min(finish(queue, pending), 4096))
    with monkeypatch.context() as patch:
        patch.setattr(KernelQueue, "start", spoiled(KernelQueue.start))
        engine.wait(engine.copy(host, disk))
        engine.wait(engine.copy(disk, back))
    assert torch.equal(content(back), values)
    engine.close()


def test_an_interrupted_wait_leaves_the_copy_in_flight(engine, pool, monkeypatch):
    """Else its memory would be used again while it is still being filled."""
    if engine.name == "adversarial":
        pytest.skip("it copies at the wait")
    disk, back = pool.allocate(Tier.DISK, 8192), pool.allocate(Tier.HOST, 8192)
    values = fill(disk, 0)
    ticket = engine.copy(disk, back)

    class Interrupted(BaseException):
        pass

    def interrupted(*_):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(KernelQueue, "finish", interrupted)
        patch.setattr(threads.Future, "exception", interrupted)
        with pytest.raises(Interrupted):
            engine.wait(ticket)
    with pytest.raises(GradientError):
        engine.release(back)
    engine.wait(ticket)
    assert torch.equal(content(back), values)
    engine.release(back)


def spoiled(start):
    """Of every transfer only the first 4096 bytes."""

    def part(queue, file, memory, nbytes, offset, **how):
        return start(queue, file, memory, 4096, offset, **how)

    return part


@pytest.mark.usefixtures("no_queue")
def test_threads_copy_beside_compute_beside_each_other_and_in_order(pool, monkeypatch):
    write, read, order = os.pwritev, os.preadv, []
    issued, reading = threading.Event(), threading.Event()

    def write_after_a_read(file, buffers, offset):
        assert issued.wait(20)  # `copy` returned although nothing can move yet
        assert reading.wait(20)  # the other lane moves while this one cannot
        return write(file, buffers, offset)

    def noted_read(file, buffers, offset):
        reading.set()
        order.append(len(buffers[0]))
        return read(file, buffers, offset)

    outs = [(pool.allocate(Tier.HOST, 64), pool.allocate(Tier.DISK, 64)) for _ in range(5)]
    ins = [(pool.allocate(Tier.DISK, 4096 * n), pool.allocate(Tier.HOST, 4096 * n)) for n in range(1, 6)]
    values = [fill(source, seed) for seed, (source, _) in enumerate(outs + ins)]
    monkeypatch.setattr(os, "pwritev", write_after_a_read)
    monkeypatch.setattr(os, "preadv", noted_read)
    engine = make_engine("threads", CPU)
    tickets = [engine.copy(source, target) for source, target in outs + ins]
    issued.set()
    engine.wait(tickets.pop())
    assert order == [4096 * n for n in range(1, 6)]  # those before it in its lane are over too
    for ticket in tickets:
        engine.wait(ticket)
    assert all(torch.equal(content(target), value) for (_, target), value in zip(outs + ins, values, strict=True))
    engine.close()


@pytest.mark.usefixtures("no_queue")
def test_threads_count_the_time_that_callers_wait(pool, monkeypatch):
    def slow(file, buffers, offset):
        time.sleep(0.1)
        return read(file, buffers, offset)

    read = os.preadv
    disk, host = pool.allocate(Tier.DISK, 64), pool.allocate(Tier.HOST, 64)
    monkeypatch.setattr(os, "preadv", slow)
    engine = make_engine("threads", CPU)
    start = time.perf_counter()
    engine.wait(engine.copy(disk, host))
    assert 0.05 < engine.statistics().wait_seconds <= time.perf_counter() - start
    engine.close()


@pytest.mark.usefixtures("no_queue")
def test_threads_end(pool):
    """By identity: threads of other tests may end meanwhile."""
    before = set(threading.enumerate())
    host, disk = pool.allocate(Tier.HOST, 64), pool.allocate(Tier.DISK, 64)
    for closes in (True, False):
        engine = make_engine("threads", CPU)
        engine.wait(engine.copy(host, disk))
        made = set(threading.enumerate()) - before
        assert len(made) == 1
        if closes:
            engine.close()
        del engine
        gc.collect()
        deadline = time.monotonic() + 5
        while made & set(threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not made & set(threading.enumerate())


def test_closing_waits_for_the_kernel_once(tmp_path):
    """To end a context of the kernel's takes tens of milliseconds, whatever is under way."""
    lanes, calls = threads.DiskLanes(), []
    lanes._queue = queue = threads.open_queue()
    if queue is None:
        pytest.skip("the kernel has no such queue")
    call = queue._call
    queue._call = lambda number, *args: calls.append(number) or call(number, *args)
    lanes.close()
    assert calls.count(queue._setup) == 0
    assert not queue._usable
