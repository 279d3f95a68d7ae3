"""Buffers (BatchNorm's statistics, spectral norm's vectors): a recompute sees the old ones and its writes are
discarded."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import nn

Slot = tuple[nn.Module, str]


def buffer_slots(modules: Sequence[nn.Module]) -> tuple[Slot, ...]:
    """Every place below ``modules`` that holds a buffer."""
    return tuple((module, name) for module in modules for name, buffer in module._buffers.items() if buffer is not None)


@runtime_checkable
class WritesBuffers(Protocol):
    """A module that knows whether it reads what it writes. BatchNorm does not, but whoever calls it may."""

    def reads_buffers(self) -> bool:
        """False where nothing that it computes depends on its buffers in the mode that it is in."""


@dataclass(frozen=True, slots=True)
class BufferSnapshot:
    """Copies of the buffers that a stage writes, from before its first run. ``unread``: slots whose content does not
    matter, so that recomputes find copies of what is there by then."""

    slots: tuple[Slot, ...]
    copies: tuple[torch.Tensor, ...]
    unread: tuple[Slot, ...] = ()

    @classmethod
    def take(cls, slots: Sequence[Slot]) -> "BufferSnapshot":
        """Copy what the slots hold now."""
        held = [module._buffers[name] for module, name in slots]
        return cls(tuple(slots), tuple(torch.empty(0) if b is None else b.detach().clone() for b in held))

    @classmethod
    def for_recomputes(cls, slots: Sequence[Slot]) -> "BufferSnapshot":
        """Copies of those that matter alone: of a million layers with BatchNorm, the others are not little."""
        unread = tuple(s for s in slots if isinstance(s[0], WritesBuffers) and not s[0].reads_buffers())
        return replace(cls.take([slot for slot in slots if slot not in unread]), unread=unread)

    def changed(self) -> tuple[Slot, ...]:
        """The slots of modules that hold any buffer whose content differs from its copy (NaN equals NaN).

        All of a module's: a mean that happens to be what it was may change at the next run, as the counter beside it
        does. (BatchNorm's kernels write without telling version counters.)
        """
        written = {
            id(module)
            for (module, name), copy in zip(self.slots, self.copies, strict=True)
            if not _same(module._buffers[name], copy)
        }
        return tuple((module, name) for module, name in self.slots if id(module) in written)

    def put_back(self) -> None:
        """Write the copies into the buffers that the modules hold."""
        with torch.no_grad():
            for (module, name), copy in zip(self.slots, self.copies, strict=True):
                buffer = module._buffers[name]
                if buffer is not None and buffer.shape == copy.shape:
                    buffer.copy_(copy)

    @contextlib.contextmanager
    def substituted(self) -> Iterator[None]:
        """Inside, modules hold fresh copies of the snapshot; afterwards the buffers that they had."""
        slots = (*self.slots, *self.unread)
        before = [module._buffers[name] for module, name in slots]
        for (module, name), copy in zip(slots, (*self.copies, *before[len(self.slots) :]), strict=True):
            module._buffers[name] = None if copy is None else copy.clone()
        try:
            yield
        finally:
            for (module, name), buffer in zip(slots, before, strict=True):
                module._buffers[name] = buffer


def _same(now: torch.Tensor | None, copy: torch.Tensor) -> bool:
    if now is None or now.shape != copy.shape or now.dtype != copy.dtype:
        return False
    return bool(torch.equal(now, copy)) or bool(((now == copy) | ((now != now) & (copy != copy))).all())
