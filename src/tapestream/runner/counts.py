"""Numbers that a stage counts in its first run alone (where `recomputing` is false): which of its values a recompute
needs.

Code that counts first and reads then has read the new value, code that reads first the old one; most never reads what
it counts. Which it is, the first recompute tells: the value with which it gives the first run's output is right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tapestream.capture.buffers import BufferSnapshot, Slot, held

Digest = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """What slots held before and after a first run, and the digest of what that run gave."""

    before: BufferSnapshot
    after: BufferSnapshot
    digest: Digest = ()

    @classmethod
    def since(cls, before: BufferSnapshot) -> "Counted":
        """Of these slots, with what they hold now."""
        return cls(before, replace(before, copies=tuple(held(slot) for slot in before.slots)))

    @property
    def names(self) -> str:
        """What was counted, for messages."""
        return ", ".join(f"{name!r} of a {type(module).__name__}" for module, name in self.before.slots)


def kinds_of(slots: Sequence[Slot]) -> tuple[tuple[type, str], ...]:
    """What slots of alike modules have in common."""
    return tuple((type(module), name) for module, name in slots)


def digest_of(tensors: Sequence[torch.Tensor]) -> Digest:
    """Equal for equal bits, and of no size."""
    found: list[Any] = []
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            found += [repr(plain.sum(dtype=torch.float64).item()), int(torch.hash_tensor(plain).item())]
    return tuple(found)
