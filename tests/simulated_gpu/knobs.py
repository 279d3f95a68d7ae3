"""Knobs: what the simulated GPU can be asked for, by environment variables or at run time."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from .library import Knob, Library

PREFIX = "SIMULATED_GPU_"


@dataclass(frozen=True)
class Knobs:
    """Each is also an environment variable: ``lag`` is ``SIMULATED_GPU_LAG``. Children inherit those."""

    devices: int = 2
    memory: int = 16 << 30  # bytes of each device
    lag: int = 0  # microseconds: each job waits for 0 to twice as long, at random
    seed: int = 0  # of the lags
    poison: int = 0  # 1: memory is filled with 0xFF when it is taken and when it is given back
    copy_in: int = 0  # microseconds that each MiB copied to the device takes, in real time
    copy_out: int = 0  # the same from the device
    workspace: int = 0  # bytes that the first matrix product of each (thread, stream) takes, as cuBLAS does
    expandable: int = 0  # 1: blocks of memory are split to the byte, as with expandable_segments
    clock: str = ""  # name of a card: the virtual clock is on

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Knobs":
        """Read them. Raises ValueError for a number that is none."""
        found: dict[str, Any] = {}
        settings = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        if "expandable_segments:True" in settings:  # PyTorch's own variables, which users are told to set
            found["expandable"] = 1
        for field in fields(cls):
            text = environment.get(PREFIX + field.name.upper())
            if text is not None:
                found[field.name] = text if field.type in (str, "str") else int(text)
        return cls(**found)

    def to_environment(self) -> dict[str, str]:
        """The variables with which a child gets these knobs."""
        return {PREFIX + field.name.upper(): str(getattr(self, field.name)) for field in fields(self)}


SET_ONCE = ("devices", "memory")
NUMBERS = ("lag", "seed", "poison", "copy_in", "copy_out", "workspace", "expandable")


def apply(library: Library, knobs: Knobs, names: tuple[str, ...]) -> None:
    """Set the knobs of these names."""
    for name in names:
        library.set_knob(Knob[name.upper()], getattr(knobs, name))


@contextmanager
def changed(library: Library, **values: int) -> Iterator[None]:
    """Set knobs for a while. Raises ValueError for one that cannot be changed while the process runs."""
    for name in values:
        if name not in NUMBERS:
            raise ValueError(f"{name} cannot be changed at run time; {', '.join(NUMBERS)} can")
    before = replace(Knobs(), **{name: library.knob(Knob[name.upper()]) for name in NUMBERS})
    apply(library, replace(before, **values), tuple(values))
    try:
        yield
    finally:
        apply(library, before, tuple(values))
