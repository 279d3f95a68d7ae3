"""The cuda engine on fake streams: right as it is, and caught as soon as any one of its edges is removed."""

import threading

import pytest
import torch
from engine_cases import content, fill, make_pool

from tapestream.errors import GradientError
from tapestream.executor.engines.cuda import CudaEngine
from tapestream.executor.engines.fake_streams import FakeStreams
from tapestream.ir import MEMORIES, Tier
from tapestream.storage import DiskFolder, Region

NBYTES = 4096


@pytest.fixture
def pool(tmp_path):
    folder = DiskFolder(tmp_path)
    yield make_pool(folder)
    folder.close()


def compute(engine, reads=(), writes=(), seed=0):
    engine.compute_begins([*reads, *writes])
    for region in writes:
        fill(region, seed)
    engine.compute_ended([*reads, *writes])


def offload_and_prefetch(engine, pool):
    """Compute writes on the device; the bytes go to disk and back, while the memory is reused."""
    device, host, disk = (pool.allocate(tier, NBYTES) for tier in MEMORIES)
    for seed in range(3):
        compute(engine, writes=[device], seed=seed)
        expected = content(device)
        out = engine.copy(device, host)
        compute(engine, reads=[device])
        engine.wait(out)
        compute(engine, writes=[device], seed=100)
        engine.wait(engine.copy(host, disk))
        engine.wait(engine.copy(disk, host))
        engine.wait(engine.copy(host, device))
        compute(engine, reads=[device])
        assert torch.equal(content(device), expected)


def reuse_of_released_memory(engine, pool):
    """A region that compute used is released, reused as it is, and made anew, each time as the target of a prefetch."""
    host = pool.allocate(Tier.HOST, NBYTES)
    values = fill(host, 0)
    for trims in (False, True, False):
        device = pool.allocate(Tier.DEVICE, NBYTES)
        compute(engine, writes=[device], seed=1)
        engine.release(device)
        pool.release(device)
        if trims:
            pool.trim()
        device = pool.allocate(Tier.DEVICE, NBYTES)
        engine.wait(engine.copy(host, device))
        compute(engine, reads=[device])
        assert torch.equal(content(device), values)
        engine.release(device)
        pool.release(device)


def update_on_the_host(engine, pool):
    """A gradient goes to the host, the CPU updates there, the parameters come back."""
    device, host = pool.allocate(Tier.DEVICE, NBYTES), pool.allocate(Tier.HOST, NBYTES)
    for seed in range(3):
        compute(engine, writes=[device], seed=seed)
        engine.wait(engine.copy(device, host))
        compute(engine, reads=[host], writes=[host], seed=seed + 10)
        expected = content(host)
        engine.wait(engine.copy(host, device))
        compute(engine, reads=[device])
        assert torch.equal(content(device), expected)


PROGRAMS = [offload_and_prefetch, reuse_of_released_memory, update_on_the_host]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_engine_has_every_edge(pool, program):
    engine = CudaEngine(FakeStreams())
    program(engine, pool)
    engine.close()


class NoComputeToCopy(FakeStreams):
    """Edge 1 removed: a copy does not wait for compute."""

    def wait(self, stream, event):
        if stream is self.current_stream():
            super().wait(stream, event)


class NoCopyToCompute(FakeStreams):
    """Edge 2 removed: compute does not wait for a copy."""

    def wait(self, stream, event):
        if stream is not self.current_stream():
            super().wait(stream, event)


class NoStreamToHost(FakeStreams):
    """Edges 3 and 4 removed: nothing on the host waits for a copy."""

    def synchronize(self, event):
        pass


class NoStreamToMainThread(FakeStreams):
    """Edge 4 removed: the worker threads wait, compute on the CPU does not."""

    def __init__(self):
        super().__init__()
        self._main = threading.get_ident()

    def synchronize(self, event):
        if threading.get_ident() != self._main:
            super().synchronize(event)


class EarlyEvents(FakeStreams):
    """Events are recorded before the copy that they stand for."""

    def copy(self, stream, source, target, nbytes):
        self.early = self.record(stream)
        super().copy(stream, source, target, nbytes)

    def wait(self, stream, event):
        if stream is self.current_stream():
            event = self.early
        super().wait(stream, event)


@pytest.mark.parametrize(
    ("streams", "program", "message"),
    [
        (NoComputeToCopy, offload_and_prefetch, "a copy reads"),
        (NoComputeToCopy, reuse_of_released_memory, "a copy overwrites"),
        (NoComputeToCopy, update_on_the_host, "a copy reads"),
        (NoCopyToCompute, offload_and_prefetch, "compute overwrites"),
        (NoCopyToCompute, reuse_of_released_memory, "compute reads"),
        (NoCopyToCompute, update_on_the_host, "compute reads"),
        (NoStreamToHost, offload_and_prefetch, "a disk transfer reads"),
        (NoStreamToHost, update_on_the_host, "compute reads"),
        (NoStreamToMainThread, update_on_the_host, "compute reads"),
        (EarlyEvents, offload_and_prefetch, "compute overwrites"),
        (EarlyEvents, reuse_of_released_memory, "compute reads"),
    ],
)
def test_every_removed_edge_is_caught(pool, streams, program, message):
    engine = CudaEngine(streams())
    with pytest.raises(GradientError, match=f"{message}.*without being ordered"):
        program(engine, pool)
    engine.close()


def region(tier=Tier.DEVICE):
    return Region(tier, NBYTES, torch.zeros(NBYTES, dtype=torch.uint8))


def test_a_copy_happens_no_sooner_than_it_must():
    api, source, target = FakeStreams(), region(), region()
    source.memory.fill_(3)
    stream = api.new_stream()
    api.copy(stream, source, target, NBYTES)
    event = api.record(stream)
    assert bool((target.memory == 0xFF).all())
    api.wait(api.current_stream(), event)
    assert bool((target.memory == 3).all())


def test_memory_released_under_a_copy_is_caught():
    api, source, target = FakeStreams(), region(), region(Tier.HOST)
    stream = api.new_stream()
    api.copy(stream, source, target, NBYTES)
    with pytest.raises(GradientError, match="whoever gets the memory overwrites"):
        api.released(source)
    source.generation += 1
    with pytest.raises(GradientError, match="released before the copy"):
        api.synchronize(api.record(stream))


def test_two_streams_that_write_one_region_are_caught():
    api, target = FakeStreams(), region(Tier.HOST)
    first, second = api.new_stream(), api.new_stream()
    api.copy(first, region(), target, NBYTES)
    with pytest.raises(GradientError, match="a copy overwrites"):
        api.copy(second, region(), target, NBYTES)
    api.wait(second, api.record(first))
    api.copy(second, region(), target, NBYTES)


def test_a_disk_read_into_memory_that_a_copy_still_reads_is_caught():
    api, host = FakeStreams(), region(Tier.HOST)
    stream = api.new_stream()
    api.copy(stream, host, region(), NBYTES)
    api.host_uses(host, writes=False)
    with pytest.raises(GradientError, match="a disk transfer overwrites"):
        api.host_uses(host, writes=True)
    api.synchronize(api.record(stream))
    api.host_uses(host, writes=True)


def test_what_a_thread_waited_for_orders_what_it_issues():
    api, device, host = FakeStreams(), region(), region(Tier.HOST)
    first, second = api.new_stream(), api.new_stream()
    api.copy(first, device, host, NBYTES)
    api.synchronize(api.record(first))
    api.copy(second, host, device, NBYTES)  # no edge between the streams, but the thread blocked in between
