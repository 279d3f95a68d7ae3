"""Seconds on a device."""

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import torch

T = TypeVar("T")


def timed(device: torch.device, run: Callable[[], T]) -> tuple[float, T]:
    """Seconds of ``run`` until the device has finished, and what it gave."""
    start = perf_counter()
    found = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start, found
