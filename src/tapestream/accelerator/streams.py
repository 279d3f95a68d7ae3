"""Streams, events and seconds of an accelerator."""

import contextlib
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TypeVar

import torch

from tapestream.accelerator.device import active, is_accelerator

T = TypeVar("T")


def new_stream(device: torch.device) -> torch.Stream:
    """A stream of ``device`` on which nothing has been issued by us."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that this thread issues compute on ``device`` to."""
    return torch.accelerator.current_stream(device)


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Inside, this thread issues to ``stream``."""
    with active(stream.device):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def event_after(stream: torch.Stream, *, timed: bool = False) -> torch.Event:
    """An event that happens when all issued to ``stream`` so far is done."""
    event = torch.Event(stream.device, enable_timing=timed)
    event.record(stream)
    return event


def synchronize(device: torch.device) -> None:
    """Block until all issued to ``device`` is done; nothing on the CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Starts now; what it returns gives the seconds on ``device`` from then until it is called.

    On an accelerator: between two events on the current stream, so that work issued earlier does not count.
    """
    if not is_accelerator(device):
        start = perf_counter()
        return lambda: perf_counter() - start
    with active(device):
        begin = event_after(current_stream(device), timed=True)

    def seconds() -> float:
        with active(device):
            end = event_after(current_stream(device), timed=True)
            end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return seconds


def timed(device: torch.device, run: Callable[[], T]) -> tuple[float, T]:
    """Seconds that ``run`` takes on ``device``, as `stopwatch` has them, and what it gave."""
    with active(device) if is_accelerator(device) else contextlib.nullcontext():
        seconds = stopwatch(device)
        found = run()
        return seconds(), found
