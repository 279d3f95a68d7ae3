"""`Cargo`: tensors split into the storages behind them, which may move, and views of these."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

SMALL_NBYTES = 16 * 2**10
"""Storages smaller than this travel together, gathered by a copy: a file for each would cost more than its bytes."""
_ALIGNMENT = 64  # bytes at whose multiples PyTorch's allocators start every storage, and ours too


@dataclass(frozen=True, slots=True)
class _Landed:
    """A device storage that received prefetched bytes, beginning at ``start``. ``counter``: an empty tensor that has
    the version of all tensors made over the storage; this was ``version`` at first.
    """

    storage: StorageWeakRef
    start: int
    counter: torch.Tensor
    version: int

    @classmethod
    def of(cls, base: torch.Tensor) -> "_Landed":
        counter = base.detach()
        counter.data = torch.empty(0, dtype=base.dtype, device=base.device)  # a version stays when its tensor changes
        storage = StorageWeakRef(base.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(storage, int(base.storage_offset()), counter, base._version)

    @property
    def written(self) -> bool:
        """Whether somebody has written into it since."""
        return self.counter._version != self.version

    def bytes(self, nbytes: int) -> torch.Tensor | None:
        """Its bytes, with the version of the others; None where nobody holds it any more."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        found = self.counter.detach()
        found.data = _bytes_of(storage, self.start, nbytes)
        return found


@dataclass(slots=True, eq=False, weakref_slot=True)
class Origin:
    """One storage of the program, wherever its bytes are now. ``first``: the device storage that was packed;
    ``landed``: the device storage that the bytes came back to.
    """

    nbytes: int
    first: StorageWeakRef
    landed: _Landed | None = None

    def living(self) -> torch.Tensor | None:
        """The bytes on the device, if somebody still holds the storage that came back last and nobody has written into
        it. (Not the storage that was packed: others may have written into it since.)
        """
        return None if self.landed is None or self.landed.written else self.landed.bytes(self.nbytes)

    def spoilt(self, memory: torch.Tensor) -> bool:
        """Whether it came back to ``memory``, and somebody has written into that since."""
        landed = self.landed
        return landed is not None and landed.written and head_of(memory) == landed.storage.cdata


Origins: TypeAlias = "WeakValueDictionary[int, Origin]"
"""By address of a storage's head, which does not change hands while an Origin refers to it."""


class _Window(NamedTuple):
    """A tensor as a window on storage number ``storage``."""

    storage: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool


Stays: TypeAlias = Callable[[torch.Tensor, int], bool]
"""Whether a tensor's bytes are not for us to move; its storage's head (see `head_of`) comes with it."""
_NOWHERE = 0  # the head of no storage


@dataclass(frozen=True, slots=True)
class Cargo:
    """``windows``: one for each tensor, or the tensor itself where its bytes do not travel. ``loads``: numbers of the
    storages that travel together, each load as one run of bytes."""

    windows: tuple[_Window | torch.Tensor, ...]
    origins: tuple[Origin, ...]
    loads: tuple[tuple[int, ...], ...]
    device: torch.device
    known: Origins

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], stays: Stays, known: Origins) -> "tuple[Cargo, list[torch.Tensor]]":
        """The cargo, and the bytes of each load on the device."""
        storages, heads = _storages_of(tensors)
        staying = {head for head, storage in storages.items() if not _begins_well(storage)}
        for tensor, head in zip(tensors, heads, strict=True):
            if head not in staying and head != _NOWHERE and (not _is_plain(tensor) or stays(tensor, head)):
                staying.add(head)
        numbers: dict[int, int] = {}
        found: list[torch.UntypedStorage] = []
        windows: list[_Window | torch.Tensor] = []
        for tensor, head in zip(tensors, heads, strict=True):
            if head == _NOWHERE or head in staying:
                windows.append(tensor)
                continue
            number = numbers.setdefault(head, len(numbers))
            if number == len(found):
                found.append(storages[head])
            offset = int(tensor.storage_offset())
            windows.append(_Window(number, offset, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj()))
        loads = tuple(_loads([storage.nbytes() for storage in found]))
        origins = tuple(_origin(storage, known) for storage in found)
        pieces = [[_bytes_of(found[number], 0, found[number].nbytes()) for number in load] for load in loads]
        memories = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in pieces]
        device = found[0].device if found else torch.device("cpu")
        return cls(tuple(windows), origins, loads, device, known), memories

    def nbytes(self, load: int) -> int:
        """Bytes of a load."""
        return sum(self.origins[number].nbytes for number in self.loads[load])

    def alone(self, load: int) -> Origin | None:
        """The storage that a load consists of, None where it is several."""
        numbers = self.loads[load]
        return self.origins[numbers[0]] if len(numbers) == 1 else None

    def unload(self, memories: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors, over the bytes of each load on the device. What is small gets memory of its own."""
        bases: dict[int, torch.Tensor] = {}
        for load, memory in zip(self.loads, memories, strict=True):
            start = 0
            for number in load:
                origin = self.origins[number]
                part = memory if len(load) == 1 else memory[start : start + origin.nbytes]
                bases[number] = self._land(origin, part)
                start += origin.nbytes
        return tuple(w if isinstance(w, torch.Tensor) else _opened(w, bases[w.storage]) for w in self.windows)

    def _land(self, origin: Origin, memory: torch.Tensor) -> torch.Tensor:
        living = origin.living()
        if living is not None:
            return living
        base = memory.clone() if origin.nbytes < SMALL_NBYTES else memory
        origin.landed = _Landed.of(base)
        self.known[head_of(base)] = origin
        return base


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in one run of memory that others may share, as all but sparse ones and the like do."""
    return tensor.layout is torch.strided and not tensor.is_meta


def held_by_others(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Heads of the storages behind ``tensors`` to which something else refers too: a parameter, a state, a variable of
    the user's."""
    storages = {head_of(t): t.untyped_storage() for t in tensors if has_storage(t)}
    mine = dict.fromkeys(storages, 1)  # the entry of this dictionary
    for tensor in tensors:
        if has_storage(tensor):
            mine[head_of(tensor)] += 1
    return {head for head, s in storages.items() if torch._C._storage_Use_Count(s._cdata) > mine[head]}


def copies_to_move(tensors: Sequence[torch.Tensor]) -> int:
    """How many copies it takes to move all that nothing but ``tensors`` holds."""
    others = held_by_others(tensors)
    sizes = {head_of(t): t.untyped_storage().nbytes() for t in tensors if has_storage(t)}
    return sum(1 for _ in _loads([nbytes for head, nbytes in sizes.items() if nbytes and head not in others]))


def _storages_of(tensors: Sequence[torch.Tensor]) -> tuple[dict[int, torch.UntypedStorage], list[int]]:
    """The storages behind ``tensors`` by their heads, and the head of each tensor's."""
    storages: dict[int, torch.UntypedStorage] = {}
    heads: list[int] = []
    for tensor in tensors:
        head = _NOWHERE
        if has_storage(tensor):
            storage = tensor.untyped_storage()
            head = storage._cdata
            storages.setdefault(head, storage)
        heads.append(head)
    return storages, heads


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a window says all about a tensor."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_quantized
    return plain and not tensor.is_neg()


def _begins_well(storage: torch.UntypedStorage) -> bool:
    """An empty one, and one that PyTorch did not align, stays as it is."""
    return storage.nbytes() > 0 and storage.data_ptr() % _ALIGNMENT == 0


def head_of(tensor: torch.Tensor) -> int:
    """What storages are told apart by: two tensors over the same one have the same."""
    return int(tensor.untyped_storage()._cdata)


def _origin(storage: torch.UntypedStorage, known: Origins) -> Origin:
    head = storage._cdata
    found = known.get(head)
    if found is not None and (head == found.first.cdata or not (found.landed is None or found.landed.written)):
        return found
    found = known[head] = Origin(storage.nbytes(), StorageWeakRef(storage))  # type: ignore[no-untyped-call]
    return found


def _loads(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    yield from ((number,) for number, nbytes in enumerate(sizes) if nbytes >= SMALL_NBYTES)
    small = tuple(number for number, nbytes in enumerate(sizes) if nbytes < SMALL_NBYTES)
    if small:
        yield small


def _bytes_of(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))


def _opened(window: _Window, base: torch.Tensor) -> torch.Tensor:
    whole = base[: base.nbytes // window.dtype.itemsize * window.dtype.itemsize].view(window.dtype)
    tensor = whole.as_strided(window.shape, window.stride, whole.storage_offset() + window.offset)
    return tensor.conj() if window.conj else tensor
