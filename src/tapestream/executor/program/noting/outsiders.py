"""`Outsiders`: the external tensors of a sweep that follows: taken one by one, noted in the record many at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from tapestream.accelerator.memory import storage_nbytes
from tapestream.executor.program.calls.templates import PLAIN
from tapestream.executor.program.calls.values import address_of
from tapestream.executor.program.noting.numbering import Numbering
from tapestream.executor.program.record.keeper import is_whole
from tapestream.executor.program.record.last import Last, Outside, Place
from tapestream.executor.program.record.record import Record, looks_of

Copied: TypeAlias = tuple[torch.Tensor, int, torch.Tensor]
"""An external tensor, the version that it had, and a copy."""
Ready: TypeAlias = tuple[torch.Tensor, int, int, int]
"""An external tensor, the version that it had, the address of its storage, and that of its first element."""
Places: TypeAlias = Mapping[int, Place]
"""Of tensors, by their ids."""
_FEW_NBYTES = 1 << 14


class Outsiders:
    """``tensors`` by number, and the ``versions`` that they had when they were used last; ``shown``: by storage, those
    that show it, by ``~k``. ``made``: ids of tensors that the program has made so far, of dead ones among them.

    Those of last time that are still there are looked at all at once when the sweep begins: between two kernels, one
    look takes as long as several that follow each other; and what operations will write into is copied, if it is small.
    """

    def __init__(
        self, last: Last, record: Record, numbers: Numbering, made: Sequence[int], places: Callable[[], Places]
    ) -> None:
        self.tensors, self.versions = list[torch.Tensor](), list[int]()
        self._made, self._known, self._looked = made, set[int](), 0
        self._places: Callable[[], Places] | Places = places
        self._last, self._record, self._numbers = last, record, numbers
        self._addresses = list[int]()
        self._storages: dict[int, int] = {}  # by address
        self.shown: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._copies: dict[int, Copied] = {}  # by storage
        self._ready = [self._as_then(then) for then in last.outside]

    def _as_then(self, then: Outside) -> Ready | None:
        """What is in the place of the tensor of last time; None where it is not as that was."""
        tensor = _found(then.place)
        memory = None if tensor is None else self._memory_as_then(tensor, then)
        if tensor is None or memory is None or not (tensor.requires_grad or memory.resizable()):
            return None
        few = then.storage in self._last.written and memory.nbytes() <= _FEW_NBYTES
        if few and not tensor.requires_grad and is_whole(tensor):
            self._copies[then.storage] = tensor, tensor._version, tensor.clone()
        return tensor, tensor._version, memory._cdata, tensor.data_ptr()

    def _memory_as_then(self, tensor: torch.Tensor, then: Outside) -> Any:
        """The storage of a leaf that looks as that of last time, None of another tensor."""
        if not tensor.is_leaf or looks_of((tensor,)) != then.looks:
            return None
        memory = tensor.untyped_storage()
        return memory if storage_nbytes(memory) == self._last.record.storage_nbytes[then.storage] else None

    def written(self, storage: int) -> tuple[list[tuple[int, torch.Tensor]], torch.Tensor | None]:
        """Those that show ``storage``, which is about to be written into, and a copy of the only one, if there is one
        as it is now."""
        shown, copied = self.shown[storage], self._copies.get(storage)
        if copied is None or len(shown) != 1:
            return shown, None
        tensor, version, copy = copied
        return shown, copy if shown[0][1] is tensor and version == tensor._version else None

    def look_again(self) -> None:
        """Something was done that may have changed others."""
        self._ready, self._copies = [], {}

    def takes(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is, for sure, external tensor ``number``, the next one, as that was last time: a leaf over
        memory into which nothing was written, and none that the program has made."""
        outside = self._last.outside
        if number != len(self.tensors) or number == len(outside):
            return False
        then = outside[number]
        if then.storage in self._record.writes:
            return False
        ready = self._ready[number] if self._ready else None
        if ready is not None and ready[0] is tensor and ready[1] == tensor._version and ready[3] == tensor.data_ptr():
            if not self._shows(ready[2], then.storage):
                return False
            self._add(tensor, then.storage, ready[2])
            return True
        return self._takes_closely(tensor, then)

    def _takes_closely(self, tensor: torch.Tensor, then: Outside) -> bool:
        self._known.update(self._made[self._looked :])
        self._looked = len(self._made)
        if type(tensor) not in PLAIN or id(tensor) in self._known:
            return False
        memory = self._memory_as_then(tensor, then)
        if memory is None or not self._shows(memory._cdata, then.storage):
            return False
        if not (tensor.requires_grad or memory.resizable()):  # it is not torch's own
            self._record.arrays.outside(then.storage, tensor)  # as it is now
        self._add(tensor, then.storage, memory._cdata)
        if not then.sought or (then.place is not None and _found(then.place) is not tensor):
            self._seek(tensor, then)
        return True

    def _seek(self, tensor: torch.Tensor, then: Outside) -> None:
        """Where the next call may well find it."""
        if callable(self._places):
            self._places = self._places()
        then.place, then.sought = self._places.get(id(tensor)), True

    def _shows(self, address: int, storage: int) -> bool:
        """Whether memory there is ``storage`` as far as external tensors know; it is then."""
        known = self._storages.get(address)
        if known is not None or storage in self.shown:
            return known == storage
        self._storages[address] = storage
        self.shown[storage] = []
        return True

    def _add(self, tensor: torch.Tensor, storage: int, address: int) -> None:
        self.shown[storage].append((~len(self.tensors), tensor))
        self.tensors.append(tensor)
        self.versions.append(tensor._version)
        self._addresses.append(address)

    def agree(self) -> bool:
        """Whether those that were looked at closely meanwhile, and are in the record, are as they were last time."""
        return all(map(self._agrees, range(len(self.tensors), len(self._record.externals))))

    def _agrees(self, number: int) -> bool:
        if number == len(self._last.outside):
            return False
        one, then = self._record.externals[number], self._last.outside[number]
        tensor = one.tensor
        if type(tensor) not in PLAIN or (one.looks, one.storage) != (then.looks, then.storage):
            return False
        address = address_of(tensor)
        if not self._shows(address, one.storage):
            return False
        self._add(tensor, one.storage, address)
        return True

    def note(self) -> None:
        """Have all in the record."""
        record, numbers = self._record, self._numbers
        for number in range(len(record.externals), len(self.tensors)):
            tensor, then, address = self.tensors[number], self._last.outside[number], self._addresses[number]
            numbers.know_storages(then.storage + 1, self._last.record.storage_nbytes)
            if address_of(tensor) != address:
                record.spoilt = record.spoilt or (
                    f"the memory of a tensor of shape {tuple(tensor.shape)} was replaced inside the program without a "
                    "torch call"
                )
            numbers.outside(tensor, then.storage, address, then.looks, self.versions[number], then.first_use)


def _found(place: Place | None) -> torch.Tensor | None:
    """The tensor that is there now, of no user's class."""
    module = None if place is None else place[0]()
    if place is None or module is None:
        return None
    tensor: torch.Tensor | None = vars(module)[place[1]].get(place[2])
    return tensor if type(tensor) in PLAIN else None
