"""`track_memory`: the one meter for profiles, measurements and tests."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tapestream.errors import InputError


class MemoryMeter:
    """What a `track_memory` block used, filled in when the block ends.

    ``peak_nbytes``: most bytes of tensors alive at once beyond those alive at the start. ``end_nbytes``: the same at
    the end. ``samples``: (seconds since the start, bytes) at every change; empty on CUDA.
    """

    def __init__(self) -> None:
        self.peak_nbytes = 0
        self.end_nbytes = 0
        self.samples: list[tuple[float, int]] = []


@contextlib.contextmanager
def track_memory(device: torch.device | str = "cpu") -> Iterator[MemoryMeter]:
    """Measure the tensor memory of the block.

    On the CPU: every event of PyTorch's allocator in this thread, workspaces of kernels included (a dispatch mode
    would miss those). On CUDA: ``max_memory_allocated``. Blocks cannot be nested, nor used inside a profiler:
    InputError.

        with track_memory() as meter:
            loss.backward()
        print(meter.peak_nbytes)
    """
    meter = MemoryMeter()
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield meter
        meter.peak_nbytes = torch.cuda.max_memory_allocated(device) - before
        meter.end_nbytes = torch.cuda.memory_allocated(device) - before
        return
    _start()
    try:
        yield meter
    finally:
        records = torch._C._autograd._disable_profiler_legacy()
        _read(records, meter)


def _start() -> None:
    _hush()
    _enable()


@functools.cache
def _hush() -> None:
    """PyTorch warns once per process, on the C level, when memory from before the start is freed.

    That is no news here: provoke it unseen.
    """
    sys.stderr.flush()
    before = torch.empty(1)
    with contextlib.ExitStack() as stack:
        shown, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, shown)
        stack.callback(os.close, nothing)
        os.dup2(nothing, 2)
        stack.callback(os.dup2, shown, 2)
        _enable()
        del before
        torch._C._autograd._disable_profiler_legacy()


def _enable() -> None:
    # The newer profiler reports the same events, but writes to standard output each time it starts and stops.
    if torch._C._autograd._profiler_enabled():
        raise InputError("track_memory() cannot run inside another track_memory() or profiler")
    experimental = torch._C._profiler._ExperimentalConfig()
    state = torch.autograd.ProfilerState.CPU  # type: ignore[attr-defined]
    make = torch.autograd.ProfilerConfig  # type: ignore[attr-defined]
    config = make(state, False, True, False, False, False, experimental)
    torch._C._autograd._enable_profiler_legacy(config)


def _read(records: Any, meter: MemoryMeter) -> None:
    current = 0
    for thread in records:
        if not thread:
            continue
        start = thread[0]
        for event in thread:
            if event.kind() != "memory_alloc":
                continue
            current += event.cpu_memory_usage()
            meter.samples.append((start.cpu_elapsed_us(event) / 1e6, current))
    meter.peak_nbytes = max((nbytes for _, nbytes in meter.samples), default=0)
    meter.end_nbytes = current
