"""Buffers (BatchNorm's statistics, spectral norm's vectors) and numbers that modules keep as attributes (how often they
were called): a recompute sees the old ones and its writes are discarded."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import nn

from tapestream.capture.python_state import is_front_end

Slot = tuple[nn.Module, str]

NUMBERS = frozenset((bool, int, float, complex, str, type(None)))
"""What counts as a number among the attributes of a module: kept in snapshots by itself."""
_EVERY_MODULES = frozenset(vars(nn.Module()))


class _Absent:
    """In a snapshot: the module itself has no such attribute (its class has)."""


ABSENT = _Absent()


def buffer_slots(modules: Sequence[nn.Module]) -> tuple[Slot, ...]:
    """Every place below ``modules`` that holds a buffer, or a number or text as an attribute."""
    buffers = ((module, name) for module in modules for name, buffer in module._buffers.items() if buffer is not None)
    attributes = ((module, name) for module in modules for name in _attributes(module))
    return (*buffers, *attributes)


def _attributes(module: nn.Module) -> list[str]:
    if is_front_end(module):
        return []
    own = [name for name, value in vars(module).items() if type(value) in NUMBERS and name not in _EVERY_MODULES]
    return [*own, *(name for name in _of_class(type(module)) if name not in vars(module))]


def _of_class(cls: type[nn.Module]) -> tuple[str, ...]:
    """What assigning to an attribute of a module would hide: numbers of its class."""
    # Not cached: a streamed module has a class of its own, which would then live for ever, and its model with it.
    classes = cls.__mro__[: cls.__mro__.index(nn.Module)]
    names = (name for one in classes for name, value in vars(one).items() if type(value) in NUMBERS)
    return tuple(dict.fromkeys(name for name in names if not name.startswith("__")))


def held(slot: Slot) -> Any:
    """What is there now."""
    module, name = slot
    return module._buffers[name] if name in module._buffers else vars(module).get(name, ABSENT)


def put(slot: Slot, value: Any) -> None:
    """Let it be there."""
    module, name = slot
    place: dict[str, Any] = module._buffers if name in module._buffers else vars(module)
    if isinstance(value, _Absent):
        place.pop(name, None)
    else:
        place[name] = value


def copied(value: Any) -> Any:
    """Of a buffer's content; numbers are never written into."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class WritesBuffers(Protocol):
    """A module that knows whether it reads what it writes. BatchNorm does not, but whoever calls it may."""

    def reads_buffers(self) -> bool:
        """False where nothing that it computes depends on its buffers in the mode that it is in."""


def _may_read(module: nn.Module) -> bool:
    # Of a protocol that is checked at run time `isinstance` would take ten times as long.
    return not hasattr(type(module), "reads_buffers") or bool(cast(WritesBuffers, module).reads_buffers())


@dataclass(frozen=True, slots=True)
class BufferSnapshot:
    """Copies of the buffers and attributes that a stage writes, from before its first run. ``unread``: slots whose
    content does not matter, so that recomputes find copies of what is there by then. ``originals``: the tensors
    that were copied, where somebody still holds them."""

    slots: tuple[Slot, ...]
    copies: tuple[Any, ...]
    unread: tuple[Slot, ...] = ()
    originals: tuple[weakref.ref[torch.Tensor] | None, ...] = ()

    @classmethod
    def take(cls, slots: Sequence[Slot]) -> "BufferSnapshot":
        """Copy what the slots hold now."""
        values = [held(slot) for slot in slots]
        originals = tuple(weakref.ref(value) if isinstance(value, torch.Tensor) else None for value in values)
        return cls(tuple(slots), tuple(map(copied, values)), originals=originals)

    @classmethod
    def for_recomputes(cls, slots: Sequence[Slot]) -> "BufferSnapshot":
        """Copies of those that matter alone: of a million layers with BatchNorm, the others are not little."""
        unread = tuple(slot for slot in slots if not _may_read(slot[0]))
        return replace(cls.take([slot for slot in slots if slot not in unread]), unread=unread)

    @staticmethod
    def nbytes_for_recomputes(slots: Sequence[Slot]) -> int:
        """What the copies for recomputes take."""
        values = [held(slot) for slot in slots if _may_read(slot[0])]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def also(self, other: "BufferSnapshot") -> "BufferSnapshot":
        """This one and another, of other slots."""
        slots, copies = (*self.slots, *other.slots), (*self.copies, *other.copies)
        return replace(self, slots=slots, copies=copies, originals=())

    def changed(self) -> tuple[Slot, ...]:
        """The slots of modules that hold any buffer whose content differs from its copy (NaN equals NaN), and those of
        modules of which any attribute does and is a number still.

        All of a module's: a mean that happens to be what it was may change at the next run, as the counter beside it
        does. (BatchNorm's kernels write without telling version counters.)
        """
        written = {
            (id(slot[0]), isinstance(copy, torch.Tensor))
            for slot, copy in zip(self.slots, self.copies, strict=True)
            if _differs(held(slot), copy)
        }
        pairs = zip(self.slots, self.copies, strict=True)
        return tuple(slot for slot, copy in pairs if (id(slot[0]), isinstance(copy, torch.Tensor)) in written)

    def put_back(self) -> None:
        """Write the copies into the buffers that the modules hold, and set attributes that are numbers still.

        A tensor that a run has put in a buffer's place (a membrane potential) is its result, or an argument: nothing
        is written into that, and the buffer becomes a copy.
        """
        originals = self.originals or (None,) * len(self.slots)
        with torch.no_grad():
            for slot, copy, original in zip(self.slots, self.copies, originals, strict=True):
                now = held(slot)
                if not isinstance(copy, torch.Tensor):
                    if type(now) in NUMBERS and now is not copy:
                        put(slot, copy)
                elif not (isinstance(now, torch.Tensor) and now.shape == copy.shape and _differs(now, copy)):
                    continue
                elif original is not None and original() is not now:
                    put(slot, copied(copy))
                else:
                    now.data.copy_(copy)  # no new version: a tape may hold it, to whom nothing has happened

    @contextlib.contextmanager
    def substituted(self) -> Iterator[None]:
        """Inside, modules hold fresh copies of the snapshot; afterwards the buffers that they had."""
        slots = (*self.slots, *self.unread)
        before = [held(slot) for slot in slots]
        for slot, copy in zip(slots, (*self.copies, *before[len(self.slots) :]), strict=True):
            put(slot, copied(copy))
        try:
            yield
        finally:
            for slot, value in zip(slots, before, strict=True):
                put(slot, value)


def _differs(now: Any, copy: Any) -> bool:
    if not isinstance(copy, torch.Tensor):
        return type(now) in NUMBERS and (type(now) is not type(copy) or now != copy)
    if isinstance(now, torch.Tensor) and (now.is_meta or copy.is_meta):  # it stands for others' while it runs
        return False
    if not isinstance(now, torch.Tensor) or now.shape != copy.shape or now.dtype != copy.dtype:
        return True
    if now.layout is not torch.strided or copy.layout is not torch.strided:  # sparse ones cannot be compared as such
        return now.layout is not copy.layout or _differs(now.to_dense(), copy.to_dense())
    return not (bool(torch.equal(now, copy)) or bool(((now == copy) | ((now != now) & (copy != copy))).all()))
