"""`Keeper`: restart checkpoints of a program: the values alive at a border between two operations."""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from tapestream.accelerator.memory import storage_nbytes
from tapestream.executor.program.record.record import OTHERS, Record
from tapestream.executor.program.record.tape import Saved
from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.guards import check_versions


@dataclass(slots=True)
class Entry:
    """A value at a border: the tensor without its graph, over memory of its own (``private``) or the program's."""

    tensor: torch.Tensor
    storage: int
    requires: bool
    private: bool
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int, *, private: bool) -> "Entry":
        """``tensor`` as it is now."""
        alias = tensor.detach()
        return cls(alias, storage, tensor.requires_grad, private, alias._version)


@dataclass(slots=True)
class Kept:
    """The state before ``operation``: values by number, and external tensors written into, by ``~k``; the generators,
    where it is a restart checkpoint; and by later operation what that has made itself of what it saves."""

    operation: int
    entries: dict[int, Entry]
    generators: TorchGenerators | None = None
    saves: dict[int, Saved] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Its values."""
        return [entry.tensor for entry in self.entries.values()]

    def check(self) -> None:
        """Raise GradientError when a kept tensor was changed in place since."""
        entries = self.entries.values()
        seen, now = tuple(e.version for e in entries), tuple(e.tensor._version for e in entries)
        check_versions("the program", seen, now)

    def unshared(self, record: Record) -> "Kept":
        """The same state, with copies of what operations from here on will write into."""
        found = _by_storage(self.entries, lambda storage: record.written_since(storage, self.operation))
        if not found:
            return self
        copies = {n: e for sharing in found.values() for n, e in copied(sharing).items()}
        return Kept(self.operation, self.entries | copies, self.generators, self.saves)


class Keeper:
    """Restart checkpoints of the first sweep, by operation; the one before operation 0 always stays.

    What an operation is about to write into is copied first for all that hold it; ``unread`` storages of others, by a
    plan, for the first one alone, which has to do where the program goes on otherwise. ``addresses``: by storage number
    that of the live storage.
    """

    def __init__(self, device: torch.device, capture: Callable[[], TorchGenerators]) -> None:
        """``capture`` takes the states of generators."""
        self.device, self._capture, self.kept = device, capture, dict[int, Kept]()
        self.addresses: dict[int, int] = {}
        self.unread = frozenset[int]()
        # By storage, in which restart checkpoints, by operation and number, it may be without a copy of its own.
        self._held: dict[int, list[tuple[int, int]]] = {}
        self._written: dict[int, tuple[torch.Tensor, int]] = {}

    def begin(self) -> None:
        """Operation 0 is to come."""
        first: TorchGenerators | None = self._capture()
        self._generators = first
        self.kept = {0: Kept(0, {}, first)}

    def keep(
        self, operation: int, alive: Mapping[int, tuple[torch.Tensor, int]], wanted: Container[int] | None = None
    ) -> None:
        """A restart checkpoint before ``operation``, of what is ``wanted`` alone where that is known."""
        entries = {
            number: Entry.of(tensor, storage, private=False)
            for number, (tensor, storage) in (*alive.items(), *self._written.items())
            if wanted is None or number in wanted
        }
        # Memory that is not torch's own (an array's) may be written into by others, and no version would tell.
        others = {e.storage for e in entries.values() if foreign(e.tensor)}
        for sharing in _by_storage(entries, others.__contains__).values():
            entries.update(copied(sharing))
        for number, entry in entries.items():
            if not entry.private:
                self._held.setdefault(entry.storage, []).append((operation, number))
        self.kept[operation] = Kept(operation, entries, self.generators())

    def add(self, operation: int, number: int, tensor: torch.Tensor, storage: int) -> None:
        """To the restart checkpoint before ``operation``, if it is still there, a value that was made, or an external
        tensor that was first used, after it."""
        kept = self.kept.get(operation)
        if kept is not None:
            kept.entries[number] = Entry.of(tensor, storage, private=False)
            self._held.setdefault(storage, []).append((operation, number))

    def hold(self, operation: int, k: int, own: Saved) -> None:
        """With the restart checkpoint before ``operation``, if it is still there, what operation ``k`` has made itself
        of what it saves."""
        kept = self.kept.get(operation)
        if kept is not None:
            kept.saves[k] = own

    def generators(self) -> TorchGenerators:
        """The states of torch's generators; equal ones are held once."""
        found = self._capture()
        self._generators = found = found if self._generators is None else found.sharing(self._generators)
        return found

    def drop(self, operation: int) -> None:
        """Give up a restart checkpoint."""
        for entry in self.kept.pop(operation).entries.values():
            if left := [place for place in self._held.pop(entry.storage, ()) if place[0] != operation]:
                self._held[entry.storage] = left

    def before_write(
        self, storage: int, externals: list[tuple[int, torch.Tensor]], copy: torch.Tensor | None = None
    ) -> None:
        """An operation is about to write into ``storage``, which ``externals`` show. ``copy``: of the only one of them,
        which shows all of it, as it is now."""
        first = [(number, tensor) for number, tensor in externals if number not in self._written]
        if storage not in self._held and not first:
            return
        if storage in self.unread and storage not in self._held and self._copied_alone(storage, externals, copy):
            return
        like = {number: Entry.of(tensor, storage, private=False) for number, tensor in first}
        places = [(operation, number, entry.requires) for operation in self.kept for number, entry in like.items()]
        for operation, number in self._held.pop(storage, ()):
            kept = self.kept.get(operation)
            if kept is not None and (entry := kept.entries.get(number)) is not None and not entry.private:
                like[number] = entry  # nothing was written since the first of them was kept: they are the same
                places.append((operation, number, entry.requires))
        copies = copied(like)
        for operation, number, requires in places:
            self.kept[operation].entries[number] = replace(copies[number], requires=requires)
        self._written.update({number: (tensor, storage) for number, tensor in first})

    def _copied_alone(self, storage: int, externals: list[tuple[int, torch.Tensor]], copy: torch.Tensor | None) -> bool:
        """For the first restart checkpoint alone, at little cost: whether it is as simple as that."""
        (number, tensor), *others = externals
        if copy is None:
            if others or tensor.requires_grad or tensor.layout is not torch.strided or not is_whole(tensor):
                return False
            copy = tensor.clone()
        self.kept[0].entries[number] = Entry(copy, storage, False, True, 0)
        self._written[number] = tensor, storage
        return True

    def also_shown(self, storage: int, number: int, tensor: torch.Tensor, record: Record) -> None:
        """Another tensor of others, first used now, shows ``storage``, which has been written into: it belongs to all
        restart checkpoints, over the memory that they have of it."""
        self._written[number] = tensor, storage
        for operation, kept in list(self.kept.items()):
            like = next((e for e in kept.entries.values() if e.storage == storage), None)
            if like is not None and like.private:
                copy = _over(like.tensor.untyped_storage(), tensor)
                kept.entries[number] = Entry(copy, storage, tensor.requires_grad, True, copy._version)
            elif like is not None or not record.written_since(storage, operation):
                self.add(operation, number, tensor, storage)
            else:
                self.drop(operation)

    def spoilt(self, storage: int) -> None:
        """An operation wrote into ``storage`` unannounced: what holds it is of no use any more."""
        for operation, kept in list(self.kept.items()):
            if any(e.storage == storage and not e.private for e in kept.entries.values()):
                self.drop(operation)

    def settle(self, record: Record) -> None:
        """The program has ended: drop what nothing uses any more."""
        self._generators, draws = None, record.draws_nbytes or record.of_users()
        for operation in [k for k in self.kept if k >= max(1, len(record))]:
            del self.kept[operation]
        alone = record.left_alone
        for operation, kept in self.kept.items():
            kept.generators = kept.generators if draws else None
            kept.entries = {
                n: e for n, e in kept.entries.items() if last_use(record, n) >= operation and e.storage not in alone
            }
        for storage in self._held.keys() & {storage for _, storage in self._written.values()}:
            self.before_write(storage, [])  # another call may, and of running statistics no version would tell

    def nbytes(self, record: Record) -> int:
        """Bytes that restart checkpoints hold beside the caller's own, each storage once."""
        return sum(held_nbytes(self.kept.values(), record).values())


def _by_storage(entries: Mapping[int, Entry], wanted: Callable[[int], bool]) -> dict[int, dict[int, Entry]]:
    """Entries that show the storages ``wanted``, by these."""
    judged: dict[int, bool] = {}
    found: dict[int, dict[int, Entry]] = {}
    for number, entry in entries.items():
        storage = entry.storage
        if storage not in judged:
            judged[storage] = wanted(storage)
        if judged[storage]:
            found.setdefault(storage, {})[number] = entry
    return found


def foreign(tensor: torch.Tensor) -> bool:
    """Whether its memory is not torch's own but an array's, say."""
    return tensor.layout is torch.strided and not tensor.untyped_storage().resizable()


def held_nbytes(kept: Iterable[Kept], record: Record) -> dict[int, int]:
    """Bytes by storage of some restart checkpoints."""
    found: dict[int, int] = {}
    for one in kept:
        if one.generators is not None and one.operation:
            found |= {-id(state): state.nbytes for state in one.generators.states()}
        for entry in one.entries.values():
            others = record.storage_external[entry.storage] == OTHERS and not entry.private
            if entry.tensor.layout is torch.strided and not others:
                storage = entry.tensor.untyped_storage()
                found[storage._cdata] = storage_nbytes(storage)
        for tensor, _ in (saved for own in one.saves.values() for saved in own):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage_nbytes(storage)
    return found


def last_use(record: Record, number: int) -> int:
    """The last operation that uses a value, or an external tensor."""
    return record.last_use[number] if number >= 0 else record.externals[~number].last_use


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether it shows all of its storage, as it lies there: a plain copy of it is one of the storage."""
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.nbytes == tensor.untyped_storage().nbytes()


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """``storage`` as ``like`` shows its own."""
    everything = torch.empty(0, dtype=torch.uint8, device=like.device)
    everything.set_(storage)
    return _shown(everything, like)


def _shown(everything: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What ``like`` shows of its storage, of these bytes: with their version, as views of one tensor have."""
    size = like.element_size()
    whole = everything[: len(everything) // size * size].view(like.dtype)
    tensor = whole.as_strided(like.size(), like.stride(), like.storage_offset())
    tensor = tensor.conj() if like.is_conj() else tensor
    return (torch._neg_view(tensor) if like.is_neg() else tensor).detach()


def copied(entries: Mapping[int, Entry]) -> dict[int, Entry]:
    """The same over one copy of their common storage: sizes, strides and places in memory (modulo 64) as they were."""
    copy: torch.Tensor | None = None
    out: dict[int, Entry] = {}
    for number, entry in entries.items():
        like = entry.tensor
        if like.layout is not torch.strided or (len(entries) == 1 and is_whole(like)):
            tensor = like.clone()
        else:
            if copy is None:
                copy = torch.empty(0, dtype=torch.uint8, device=like.device)
                copy.set_(like.untyped_storage().clone())  # type: ignore[no-untyped-call]
            tensor = _shown(copy, like)
        out[number] = Entry(tensor, entry.storage, entry.requires, True, tensor._version)
    return out
