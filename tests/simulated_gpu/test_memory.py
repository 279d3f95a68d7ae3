"""Memory of the device and page-locked memory of the host behave as CUDA's do."""

import ctypes
import mmap
import os
import signal

import pytest
import torch

from simulated_gpu import Simulator

MIB = 1 << 20


def test_the_cpu_cannot_touch_memory_of_the_device(simulator: Simulator) -> None:
    x = torch.ones(10, device="cuda")
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(x.data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_sizes_are_rounded_and_segments_kept(simulator: Simulator) -> None:
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    small = torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() == allocated + 512
    large = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - reserved in (20 * MIB, 22 * MIB)
    del small, large
    assert torch.cuda.memory_allocated() == allocated
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


def test_memory_is_used_again_in_the_order_of_its_stream_and_by_no_other(simulator: Simulator) -> None:
    x = torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda")
    address = x.data_ptr()
    other = torch.cuda.Stream()
    del x
    with torch.cuda.stream(other):
        elsewhere = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    here = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    assert here.data_ptr() == address
    assert elsewhere.data_ptr() != address


def test_recorded_streams_keep_memory(simulator: Simulator) -> None:
    x = torch.zeros(7 * MIB, dtype=torch.uint8, device="cuda")
    address, other = x.data_ptr(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with simulator.paused(other):
        with torch.cuda.stream(other):
            x.add_(1)
        x.record_stream(other)
        del x
        meanwhile = torch.empty(7 * MIB, dtype=torch.uint8, device="cuda")
        assert meanwhile.data_ptr() != address
    other.synchronize()
    assert torch.empty(7 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == address


def test_the_limit_holds(simulator: Simulator) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(1).total_memory
    torch.cuda.set_per_process_memory_fraction(32 * MIB / total, 1)
    kept = torch.empty(25 * MIB, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(25 * MIB, dtype=torch.uint8, device="cuda:1")
    torch.cuda.set_per_process_memory_fraction(1.0, 1)
    assert kept.device == torch.device("cuda:1")


def test_page_locked_memory_is_copied_later_and_other_memory_now(simulator: Simulator) -> None:
    locked, pageable = torch.ones(100).pin_memory(), torch.ones(100)
    x, y = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    with simulator.paused():
        x.copy_(locked, non_blocking=True)
        y.copy_(pageable, non_blocking=True)
        locked.fill_(2)
        pageable.fill_(2)
    assert x.sum().item() == 200
    assert y.sum().item() == 100


def test_the_host_sees_old_bytes_until_a_copy_has_come(simulator: Simulator) -> None:
    host, device = torch.zeros(100).pin_memory(), torch.full((100,), 3.0, device="cuda")
    torch.cuda.synchronize()
    with simulator.paused():
        host.copy_(device, non_blocking=True)
        assert host.sum() == 0
    torch.cuda.synchronize()
    assert host.sum() == 300


def test_pages_that_are_registered_are_locked(simulator: Simulator) -> None:
    pages = torch.frombuffer(mmap.mmap(-1, 1 << 16), dtype=torch.uint8)
    assert not pages.is_pinned()
    assert torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.nbytes, 0) == 0
    assert pages.is_pinned()
    device = torch.empty(1 << 16, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with simulator.paused():
        device.copy_(pages, non_blocking=True)
        with pytest.raises(RuntimeError, match="while a copy used it"):
            torch.cuda.cudart().cudaHostUnregister(pages.data_ptr())
    torch.cuda.synchronize()


def test_poison_shows_what_nobody_has_written(simulator: Simulator) -> None:
    with simulator.knobs(poison=1):
        assert torch.empty(3, device="cuda").isnan().all()
        assert torch.empty(3, pin_memory=True).isnan().all()


def test_page_locked_memory_is_kept_while_a_copy_reads_it(simulator: Simulator) -> None:
    device = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with simulator.knobs(poison=1):
        with simulator.paused():
            device.copy_(torch.ones(1000).pin_memory(), non_blocking=True)
            again = torch.zeros(1000).pin_memory()
        assert device.sum().item() == 1000
    assert again.sum() == 0


def test_products_take_a_workspace_once_a_stream(simulator: Simulator) -> None:
    x = torch.ones(4, 4, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    with simulator.knobs(workspace=32 * MIB):
        for stream in (torch.cuda.default_stream(), torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                x.mm(x)
    assert torch.cuda.memory_allocated() - before == 64 * MIB
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before
