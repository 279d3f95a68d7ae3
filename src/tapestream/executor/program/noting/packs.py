"""`Packs`: what the operations of the first sweep save for backward: kept or dropped, and its bytes noted."""

from collections.abc import Callable, Container, Mapping, Sequence

import torch

from tapestream.accelerator.memory import storage_nbytes
from tapestream.executor.program.calls.values import address_of
from tapestream.executor.program.noting.numbering import Numbering
from tapestream.executor.program.record.record import MIXED, Record, look
from tapestream.executor.program.record.tape import Handle, Saved, Tape, handle


class Packs:
    """``taking``: whether it is kept. ``holding``: operations of which what they have made themselves is kept with the
    restart checkpoint before an earlier operation, which is there (``hold``). ``unreached``: see `Record`. ``nbytes``:
    what all operations so far have saved; ``count``: how often this one has so far."""

    def __init__(self, record: Record, numbers: Numbering, tape: Tape, hold: Callable[[int, int, Saved], None]) -> None:
        self.taking = True
        self.holding: Mapping[int, int] = {}
        self.unreached: Container[int] = ()
        self.nbytes = 0
        self._record, self._numbers, self._tape, self._hold = record, numbers, tape, hold
        self._counted = bytearray()  # by storage, whether its bytes are among those saved
        self.count = self._look = 0
        self._given: int | None = None  # how many were saved before the first that the operation has made
        # Made by the operation, and held until it ends, so that addresses tell its results from what it does inside.
        self._own: Saved = []
        # Where what an operation saves is put and not looked at yet, and the handle of the first.
        self.listed: list[torch.Tensor] | None = None
        self.first = 0

    def add(self, tensor: torch.Tensor) -> Handle:
        """The next one: keep it or drop it, and count its bytes: a storage's at the operation that saves it first."""
        operation, place = len(self._record.calls), self.count
        self.count, self._look = place + 1, look(self._look, tensor)
        if self.taking and operation not in self.unreached:
            self._tape.saved.setdefault(operation, []).append((tensor.detach(), tensor._version))
        if self._tape.running is not None:
            self._tape.running[1].append((tensor.detach(), tensor._version))
        storage = self._numbers.storage_at(address_of(tensor))
        if storage is None:
            if not self._own:
                self._given = place
            self._own.append((tensor.detach(), tensor._version))
        else:
            if self._own:
                self._given = MIXED
            self._add(storage)
        return handle(operation, place)

    def begin(self, k: int) -> None:
        """Forget what operation ``k`` has saved so far."""
        if self.count:
            record = self._record
            del record.saves[record.save_ends[k - 1] if k else 0 :]
            self._tape.saved.pop(k, None)
            self._clear()

    def end(self, k: int) -> None:
        """Operation ``k`` has saved all, and its results are known."""
        record, inner = self._record, 0
        if self._own:
            inner = self._inner_nbytes()
            operation = self.holding.get(k)
            if operation is not None:
                self._hold(operation, k, self._own)
        record.save_ends.append(len(record.saves))
        record.packs.append(self.count)
        record.given.append(self.count if self._given is None else self._given)
        record.looks.append(self._look)
        record.inner_nbytes.append(inner)
        if self.count:
            self.nbytes += inner
            self._clear()

    def take(self, k: int, saved: Sequence[torch.Tensor], given: int) -> None:
        """Operation ``k`` has saved these, of which it has made those from ``given`` on itself: keep them or not."""
        operation = self.holding.get(k) if self.holding else None
        if self.taking or operation is not None:
            # What is no result of an operation has no graph that would hold this in turn.
            found = [(t if t.is_leaf else t.detach(), t._version) for t in saved]
            if self.taking and k not in self.unreached:
                self._tape.saved[k] = found
            if operation is not None and found[given:]:
                self._hold(operation, k, found[given:])

    def noted(self, saves: Sequence[int], nbytes: int) -> None:
        """The record has more of what operations save, ``saves``, and knows the bytes that all have saved."""
        if saves:
            counted = self._counted_up_to(max(saves))
            for storage in saves:
                counted[storage] = 1
        self.nbytes = nbytes

    def _inner_nbytes(self) -> int:
        """Bytes that no value shows."""
        inner: dict[int, int] = {}
        for tensor, _ in self._own:
            address = address_of(tensor)
            storage = self._numbers.storage_at(address)
            if storage is not None:
                self._add(storage)
            elif tensor.layout is torch.strided:
                inner[address] = storage_nbytes(tensor.untyped_storage())
        return sum(inner.values())

    def _clear(self) -> None:
        self.count = self._look = 0
        self._given, self._own = None, []

    def _add(self, storage: int) -> None:
        """Autograd has saved something of a storage; those of others do not count."""
        if self._record.storage_external[storage]:
            return
        self._record.saves.append(storage)
        if self._count(storage):
            self.nbytes += self._record.storage_nbytes[storage]

    def _count(self, storage: int) -> bool:
        """Whether it is saved for the first time."""
        counted = self._counted_up_to(storage)
        first = not counted[storage]
        counted[storage] = 1
        return first

    def _counted_up_to(self, storage: int) -> bytearray:
        """With a place for ``storage``."""
        counted = self._counted
        if storage >= len(counted):
            counted.extend(bytes(storage + 1 - len(counted)))
        return counted
