"""What surrounds a run besides its inputs: random generators, autocast, and the flag that says "this is a
recompute"."""

import contextlib
import random
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy
import torch

_RECOMPUTING: ContextVar[bool] = ContextVar("tapestream_recomputing", default=False)


def recomputing() -> bool:
    """True inside a stage that runs again in order to rebuild its saved tensors.

    User code that counts, logs or collects in a stage asks this to do so once.
    """
    return _RECOMPUTING.get()


@contextlib.contextmanager
def as_recompute() -> Iterator[None]:
    """Make `recomputing` true inside."""
    token = _RECOMPUTING.set(True)
    try:
        yield
    finally:
        _RECOMPUTING.reset(token)


@dataclass(frozen=True, slots=True)
class TorchGenerators:
    """States of torch's default generators (CPU, and the CUDA device in use)."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> "TorchGenerators":
        """The states as they are now."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda)

    def restore(self, device: torch.device) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)

    def equals(self, other: "TorchGenerators") -> bool:
        """Nothing was drawn in between."""
        if not torch.equal(self.cpu, other.cpu):
            return False
        if self.cuda is None or other.cuda is None:
            return self.cuda is other.cuda
        return torch.equal(self.cuda, other.cuda)


@dataclass(frozen=True, slots=True)
class HostGenerators:
    """States of Python's and NumPy's global generators: slow to capture (50 microseconds), so taken only where
    needed."""

    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> "HostGenerators":
        """The states as they are now."""
        return cls(random.getstate(), numpy.random.get_state(legacy=False))

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)

    def equals(self, other: "HostGenerators") -> bool:
        """Nothing was drawn in between."""
        mine, theirs = self.numpy["state"], other.numpy["state"]
        return (
            self.python == other.python and mine["pos"] == theirs["pos"] and bool((mine["key"] == theirs["key"]).all())
        )


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast as the user's call sees it, for the device's type and for the CPU."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def capture(cls, device: torch.device) -> "Autocast":
        """The settings as they are now."""
        return cls(
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in sorted({device.type, "cpu"})
            )
        )

    @property
    def enabled(self) -> bool:
        """Whether any casting takes place."""
        return any(enabled for _, enabled, _ in self.settings)

    def dtype(self, device: torch.device) -> torch.dtype:
        """What ``device``'s operations cast to where casting is enabled."""
        return next(dtype for kind, _, dtype in self.settings if kind == device.type)

    @contextlib.contextmanager
    def entered(self, *, cache: bool) -> Iterator[None]:
        """The same casting inside.

        A stage casts its weights by itself: the global cache would keep casts of weights that have left the device, so
        it is off, or (``cache``, for stages that use one weight twice) cleared on both sides.
        """
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cache and enabled))
            if cache and self.enabled:
                torch.clear_autocast_cache()
                stack.callback(torch.clear_autocast_cache)
            yield
