"""`Rates`: how fast a device computes, and how long operations take at that."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tapestream.costs.checks import duration, speed

Operation: TypeAlias = tuple[int, int]
"""Floating-point operations, and bytes that are read and written."""
Work: TypeAlias = Mapping[Operation, int]
"""How many operations there are of each kind."""


@dataclass(frozen=True, slots=True)
class Rates:
    """An operation takes max(FLOPs / ``flops_per_second``, bytes / ``memory_bytes_per_second``) (the roofline of
    Williams, Waterman, Patterson 2009) and ``launch_seconds``. ``host_updates_per_second``: numbers of parameters that
    an optimizer updates in RAM below an accelerator."""

    flops_per_second: float
    memory_bytes_per_second: float
    launch_seconds: float
    host_updates_per_second: float = 2.5e9

    def __post_init__(self) -> None:
        speed("Rates", "flops_per_second", self.flops_per_second)
        speed("Rates", "memory_bytes_per_second", self.memory_bytes_per_second)
        duration("Rates", "launch_seconds", self.launch_seconds)
        speed("Rates", "host_updates_per_second", self.host_updates_per_second)

    def seconds(self, work: Work) -> float:
        """Of all operations, one after the other."""
        return sum(
            count * (max(flops / self.flops_per_second, nbytes / self.memory_bytes_per_second) + self.launch_seconds)
            for (flops, nbytes), count in work.items()
        )


def usual_rates(device: str) -> Rates:
    """Where nothing is known of a device, "cpu" or an accelerator. PyTorch issues 200,000 small operations a second; a
    CPU also has to do them."""
    return Rates(100e9, 5e9, 10e-6) if device == "cpu" else Rates(100e12, 1e12, 5e-6)
