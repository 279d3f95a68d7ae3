"""How fast the device is at what a network consists of: the bounds that a step's seconds are compared with."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn import functional as F

from benchmarks.common import synchronize


def product_flops_per_second(rows: int, inner: int, columns: int, dtype: torch.dtype, device: str) -> float:
    """Of the matrix product (rows, inner) x (inner, columns)."""
    left = torch.randn(rows, inner, device=device, dtype=dtype)
    right = torch.randn(inner, columns, device=device, dtype=dtype)
    return 2 * rows * inner * columns / _seconds(lambda: left @ right, device)


def convolution_flops_per_second(images: int, channels: int, size: int, device: str) -> float:
    """Of a 3x3 convolution that keeps ``channels`` and ``size``, in float32 as PyTorch has it by default."""
    x = torch.randn(images, channels, size, size, device=device)
    kernel = torch.randn(channels, channels, 3, 3, device=device)
    return 2 * 9 * images * channels**2 * size**2 / _seconds(lambda: F.conv2d(x, kernel, padding=1), device)


def _seconds(work: Callable[[], object], device: str) -> float:
    """The median of ten measurements of ten calls each, after three unmeasured."""
    found = []
    for number in range(13):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(10):
            work()
        synchronize(device)
        found += [(time.perf_counter() - begin) / 10] if number > 2 else []
    return median(found)
