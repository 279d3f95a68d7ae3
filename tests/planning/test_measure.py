"""measure_machine: sensible rates in about two seconds, nothing left behind, clear refusals."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch

from tapestream.costs import Machine
from tapestream.errors import InputError, StorageError
from tapestream.ir import Tier
from tapestream.planning import measure
from tapestream.planning.measure import measure_machine

DISK_TO_DEVICE = (Tier.DISK, Tier.DEVICE)
DEVICE_TO_DISK = (Tier.DEVICE, Tier.DISK)
TINY = measure._Effort(0.01, 2**16, 2**16)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few small chunks: the arithmetic is the same."""
    monkeypatch.setattr(measure, "_THOROUGH", TINY)


def assert_sensible(machine: Machine) -> None:
    for link in machine.links.values():
        assert 1e5 < link.bytes_per_second < 1e13
        assert 0 < link.mixed <= link.bytes_per_second
        assert 0 < link.latency_seconds < 1
    assert machine.flops_per_second is not None
    assert 1e7 < machine.flops_per_second < 1e16
    assert machine.memory_bytes_per_second is not None
    assert 1e7 < machine.memory_bytes_per_second < 1e14
    assert machine.launch_seconds is not None
    assert 1e-8 < machine.launch_seconds < 1e-2
    assert machine.name


def test_cpu_links_join_disk_and_device_and_nothing_is_left(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    begin = time.perf_counter()
    machine = measure_machine("cpu", tmp_path)
    assert time.perf_counter() - begin < 20  # about 2 on an idle machine
    assert set(machine.links) == {DISK_TO_DEVICE, DEVICE_TO_DISK}
    assert_sensible(machine)
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_quick_measurement_moves_little_and_leaves_flops_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock moved by hand, on which every copy takes 10 ms: no more than the least number of samples."""
    now, moved = 0.0, 0

    def copy(file: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal now, moved
        now, moved = now + 0.01, moved + len(buffers[0])
        return len(buffers[0])

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    monkeypatch.setattr(os, "preadv", copy)
    monkeypatch.setattr(os, "pwritev", copy)
    monkeypatch.setattr(measure, "ThreadPoolExecutor", InTurn)
    machine = measure_machine("cpu", tmp_path, quick=True)
    assert machine.flops_per_second is None
    assert [link.bytes_per_second for link in machine.links.values()] == pytest.approx([2**21 / 0.01] * 2)
    assert moved <= 6 * 3 * 2**21 + 6 * 4096


def test_a_step_waits_for_few_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = []
    drop = measure.Parcels.drop
    monkeypatch.setattr(measure.Parcels, "drop", lambda *args: (trips.append(1), time.sleep(0.01), drop(*args)))
    measure_machine("cpu", tmp_path, quick=True)
    assert len(trips) == 4  # the first of which does not count


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_links_pass_through_the_host(tmp_path: Path) -> None:
    machine = measure_machine("cuda", tmp_path)
    host = {(Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST)}
    assert set(machine.links) == {(Tier.DISK, Tier.HOST), (Tier.HOST, Tier.DISK)} | host
    assert_sensible(machine)


@pytest.mark.usefixtures("quick")
def test_rates_are_medians_of_what_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read takes 1 s, but for one in three that takes 100 s; every write 2 s: on a clock moved by hand."""
    now = 0.0
    reads = 0

    def slow_read(file: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal now, reads
        reads += 1
        now += 100 if reads % 3 == 0 else 1
        return len(buffers[0])

    def slow_write(file: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal now
        now += 2
        return len(buffers[0])

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    monkeypatch.setattr(os, "preadv", slow_read)
    monkeypatch.setattr(os, "pwritev", slow_write)
    monkeypatch.setattr(measure, "ThreadPoolExecutor", InTurn)
    read, write = measure._disk_links(tmp_path, TINY)
    assert read.bytes_per_second == pytest.approx(2**16)
    assert write.bytes_per_second == pytest.approx(2**15)
    assert (read.latency_seconds, write.latency_seconds) == (1, 2)


class InTurn:
    """An executor that runs at once, in the caller's thread."""

    def __init__(self, workers: int) -> None: ...

    def __enter__(self) -> "InTurn":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function, *arguments):
        outcome = function(*arguments)
        return type("Done", (), {"result": lambda self: outcome})()


@pytest.mark.usefixtures("quick")
def test_a_filesystem_without_direct_io_is_measured_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, synced = os.open, []

    def refuse_direct(name: str, flags: int, mode: int = 0o777, **rest: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return plain(name, flags, mode, **rest)

    monkeypatch.setattr(os, "open", refuse_direct)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    assert_sensible(measure_machine("cpu", tmp_path))
    assert len(synced) >= 12  # every write reaches the disk before its clock stops
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("partial", [True, False])
def test_a_full_disk_is_named_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    def full(file: int, buffers: list[memoryview], offset: int) -> int:
        if partial:
            return 4096
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match=r"is full: .* are free and 384 KiB to 4.00 MiB are needed") as caught:
        measure_machine("cpu", tmp_path)
    assert str(caught.value).startswith(f"measure_machine: {tmp_path}")
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_missing_or_unwritable_folders_and_unknown_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no folder .*nowhere"):
        measure_machine("cpu", tmp_path / "nowhere")
    with pytest.raises(InputError, match="'meta' has no memory"):
        measure_machine("meta", tmp_path)
    with pytest.raises(StorageError, match="cannot write in /proc/self"):
        measure_machine("cpu", "/proc/self")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="use device='cpu'"):
        measure_machine("cuda", tmp_path)
