"""What the machine is: the card, its memory and links, page-locking, matrix products."""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import psutil
import torch

import tapestream as ts
from benchmarks.gpu.contact.chosen import Chosen
from benchmarks.gpu.contact.results import Result
from benchmarks.gpu.speeds import product_flops_per_second
from tapestream.frontends.available import host_nbytes

_WITHIN = 0.25  # plans change with rates that are wrong by half


def measure(chosen: Chosen) -> Iterator[Result]:
    """The machine, page-locking, copies, products, and what `ts.measure_machine` makes of them."""
    yield Result("machine", numbers=_machine())
    nbytes = chosen.size(2**30, 2**24)
    region, locking = _page_locked(2 * nbytes)
    yield Result("page-locking", numbers=locking)
    copies = _copies(region[:nbytes], torch.empty(nbytes, dtype=torch.uint8, device=chosen.device))
    faster = all(
        copies[f"{way}_bytes_per_second"] >= copies[f"pageable_{way}_bytes_per_second"] for way in ("up", "down")
    )
    yield Result("copies", "page-locked copies are no slower than pageable ones", chosen.of_speed(faster), copies)
    _unlock(region)
    yield Result("products", numbers=_products(chosen))
    yield _as_planned(chosen, copies)


def _machine() -> dict[str, Any]:
    card, memory = torch.cuda.get_device_properties(0), psutil.virtual_memory()
    free, total = torch.cuda.mem_get_info()
    return {
        "card_bytes": total, "card_free_bytes": free, "multiprocessors": card.multi_processor_count,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())), "driver": _driver(),
        "cuda": torch.version.cuda, "torch": torch.__version__, "python": platform.python_version(),
        "cores": os.cpu_count(), "cores_allowed": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(),
        "ram_bytes": memory.total, "ram_available_bytes": host_nbytes(), "processor": _processor(),
    }  # fmt: skip


def _driver() -> str:
    try:
        command = [
            "nvidia-smi",
            "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max",
            "--format=csv,noheader",
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _page_locked(nbytes: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Fresh memory, page-locked: what a model's home costs before its first step; and the same when it was touched."""
    fresh = torch.empty(nbytes, dtype=torch.uint8)
    locked = _seconds_of(lambda: _lock(fresh))
    _unlock(fresh)
    again = _seconds_of(lambda: _lock(fresh))
    return fresh, {
        "region_bytes": nbytes, "fresh_bytes_per_second": nbytes / locked, "touched_bytes_per_second": nbytes / again,
    }  # fmt: skip


def _lock(region: torch.Tensor) -> None:
    status = torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.nbytes, 0)
    if int(status):
        raise RuntimeError(f"cudaHostRegister of {region.nbytes} bytes: error {int(status)}")


def _unlock(region: torch.Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(region.data_ptr())


def _copies(host: torch.Tensor, device: torch.Tensor) -> dict[str, float]:
    """Bytes a second of each direction, alone and both at once; and of memory that is not page-locked."""
    other, pageable = torch.empty_like(device), torch.ones_like(host)
    back = torch.empty_like(device)
    up, down = torch.cuda.Stream(), torch.cuda.Stream()
    half = host.nbytes // 2

    def both() -> None:
        with torch.cuda.stream(up):
            other[:half].copy_(host[:half], non_blocking=True)
        with torch.cuda.stream(down):
            host[half:].copy_(back[half:], non_blocking=True)

    def little() -> None:
        device[:4096].copy_(host[:4096], non_blocking=True)

    return {
        "up_bytes_per_second": _rate(host.nbytes, lambda: device.copy_(host, non_blocking=True)),
        "down_bytes_per_second": _rate(host.nbytes, lambda: host.copy_(device, non_blocking=True)),
        "both_at_once_each_bytes_per_second": _rate(half, both),
        "pageable_up_bytes_per_second": _rate(host.nbytes, lambda: device.copy_(pageable), 2),
        "pageable_down_bytes_per_second": _rate(host.nbytes, lambda: pageable.copy_(device), 2),
        "small_up_seconds": median(_seconds_of(little) for _ in range(20)),
    }  # fmt: skip


def _rate(nbytes: int, work: Callable[[], object], times: int = 5) -> float:
    work()
    return nbytes / median(_seconds_of(work) for _ in range(times))


def _seconds_of(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _products(chosen: Chosen) -> dict[str, float]:
    """FLOP/s of square products, and what one launch costs the host."""
    large, small = chosen.size((8192, 4096), (256, 128))
    one = torch.zeros(1, device=chosen.device)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(1000):
        one.add_(1)
    launched = (time.perf_counter() - begin) / 1000
    return {
        "bfloat16_flops_per_second": product_flops_per_second(large, large, large, torch.bfloat16, chosen.device),
        "float32_flops_per_second": product_flops_per_second(small, small, small, torch.float32, chosen.device),
        "launch_seconds": launched,
    }  # fmt: skip


def _as_planned(chosen: Chosen, copies: dict[str, float]) -> Result:
    """Plans rest on the speeds that `ts.measure_machine` finds."""
    machine = ts.measure_machine(chosen.device, quick=True)
    up, down = machine.link(ts.Tier.HOST, ts.Tier.DEVICE), machine.link(ts.Tier.DEVICE, ts.Tier.HOST)
    numbers = {
        "up_bytes_per_second": up.bytes_per_second, "down_bytes_per_second": down.bytes_per_second,
        "up_mixed_bytes_per_second": up.mixed, "down_mixed_bytes_per_second": down.mixed,
        "up_over_measured": up.bytes_per_second / copies["up_bytes_per_second"],
        "down_over_measured": down.bytes_per_second / copies["down_bytes_per_second"],
    }  # fmt: skip
    within = all(abs(numbers[f"{way}_over_measured"] - 1) <= _WITHIN for way in ("up", "down"))
    return Result(
        "measure_machine", f"link speeds within {_WITHIN:.0%} of the copies above", chosen.of_speed(within), numbers
    )
