"""`track_memory`: the one meter for profiles, measurements and tests."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tapestream.accelerator import memory
from tapestream.accelerator.device import indexed, is_accelerator
from tapestream.errors import InputError


class MemoryMeter:
    """What a `track_memory` block used. Filled in when the block ends.

    ``peak_nbytes``: most bytes of tensors alive at once, beyond those alive at the start. ``end_nbytes``: the same at
    the end. ``rise_nbytes``: most bytes gained since any earlier moment. This is at least the peak, and more if the
    block first frees what was there before it (on an accelerator it is the peak). ``samples``: (seconds since the
    start, bytes) at every change; empty on an accelerator.
    """

    def __init__(self) -> None:
        self.peak_nbytes = 0
        self.rise_nbytes = 0
        self.end_nbytes = 0
        self.samples: list[tuple[float, int]] = []


class MemoryWatch:
    """Sections of a `watch_memory` block: measured, or left alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextlib.contextmanager
    def measured(self) -> Iterator[MemoryMeter]:
        """Measure the tensor memory of one section; sections cannot be nested."""
        meter = MemoryMeter()
        if is_accelerator(self.device):
            memory.let_go_of_backward(self.device)
            before = memory.allocated_nbytes(self.device)
            memory.reset_peaks(self.device)
            yield meter
            memory.let_go_of_backward(self.device)
            meter.peak_nbytes = meter.rise_nbytes = memory.peak_allocated_nbytes(self.device) - before
            meter.end_nbytes = memory.allocated_nbytes(self.device) - before
            return
        _stop()
        _start()
        try:
            yield meter
        finally:
            _read(_stop(), meter)
            _start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let a section run at full speed, unseen: it should free whatever it makes, and nothing else."""
        if is_accelerator(self.device):
            yield
            return
        _stop()
        try:
            yield
        finally:
            _start()


@contextlib.contextmanager
def watch_memory(device: torch.device | str = "cpu") -> Iterator[MemoryWatch]:
    """Watch a block of which `MemoryWatch.measured` will measure sections.

    PyTorch's reporter on the CPU looks up what is freed by its address, and learns only while somebody watches. After
    an address known from one measurement is freed unseen, whatever comes to lie there later counts as that old size
    when it is freed in another measurement. So: to give equal bytes for equal runs, measure within one watch, in which
    everything is made that the sections free. InputError inside another watch or a profiler.
    """
    device = torch.device(device)
    if is_accelerator(device):
        memory.workspaces_nbytes(indexed(device))  # else the first product would seem to take them
        yield MemoryWatch(device)
        return
    _hush()
    _start()
    try:
        yield MemoryWatch(device)
    finally:
        _stop()


@contextlib.contextmanager
def track_memory(device: torch.device | str = "cpu") -> Iterator[MemoryMeter]:
    """Measure the tensor memory of the block.

    On the CPU: every event of PyTorch's allocator in this thread, workspaces of kernels included (a dispatch mode would
    miss those). On an accelerator: ``max_memory_allocated``. Raises InputError in another such block or in a profiler.
    To compare two measurements exactly, use `watch_memory`.

        with track_memory() as meter:
            loss.backward()
        print(meter.peak_nbytes)
    """
    with watch_memory(device) as watch, watch.measured() as meter:
        yield meter


def profiling() -> bool:
    """Whether memory on the CPU cannot be measured now, since a measurement or a profiler runs."""
    return bool(torch._C._autograd._profiler_enabled())


@functools.cache
def _hush() -> None:
    """PyTorch warns once per process, on the C level, when memory from before the start is freed.

    That is no news here: provoke it unseen.
    """
    sys.stderr.flush()
    before = torch.empty(1, device="cpu")
    with contextlib.ExitStack() as stack:
        shown, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, shown)
        stack.callback(os.close, nothing)
        os.dup2(nothing, 2)
        stack.callback(os.dup2, shown, 2)
        _start()
        del before
        _stop()


def _start() -> None:
    # The newer profiler reports the same events, but writes to standard output each time it starts and stops.
    if profiling():
        raise InputError(
            "memory cannot be measured inside track_memory() or a profiler, but a first call with new shapes is "
            "measured: make that call once before, without a profiler"
        )
    experimental = torch._C._profiler._ExperimentalConfig()
    state = torch.autograd.ProfilerState.CPU  # type: ignore[attr-defined]
    make = torch.autograd.ProfilerConfig  # type: ignore[attr-defined]
    config = make(state, False, True, False, False, False, experimental)
    torch._C._autograd._enable_record_function(False)  # names of operations are not asked for, and cost more than bytes
    torch._C._autograd._enable_profiler_legacy(config)


def _stop() -> Any:
    torch._C._autograd._enable_record_function(True)
    return torch._C._autograd._disable_profiler_legacy()


def _read(records: Any, meter: MemoryMeter) -> None:
    current = lowest = 0
    for thread in records:
        if not thread:
            continue
        start = thread[0]
        for event in thread:
            if event.kind() != "memory_alloc":
                continue
            current += event.cpu_memory_usage()
            lowest = min(lowest, current)
            meter.rise_nbytes = max(meter.rise_nbytes, current - lowest)
            meter.samples.append((start.cpu_elapsed_us(event) / 1e6, current))
    meter.peak_nbytes = max(0, max((nbytes for _, nbytes in meter.samples), default=0))
    meter.end_nbytes = current
