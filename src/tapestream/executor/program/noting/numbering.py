"""`Numbering`: which tensor of a running program is which value, external tensor and storage of its record."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from tapestream.accelerator.memory import storage_nbytes
from tapestream.capture.fused_steps import fused_steps
from tapestream.errors import InputError
from tapestream.executor.program.calls.values import Ref, address_of, nbytes_of
from tapestream.executor.program.record.ambients import unshown
from tapestream.executor.program.record.keeper import Keeper, foreign
from tapestream.executor.program.record.record import ALIVE, MAYBE_OWN, OTHERS, External, Record, looks_of
from tapestream.runner.graph import next_sequence_number

if TYPE_CHECKING:
    from tapestream.executor.program.noting.following import Following


class Numbering:
    """Values are watched weakly, external tensors held.

    ``alive_nbytes``: of what the program has made and still holds; ``made_nbytes``: the same of what was made since
    that was set to 0. ``shown``: external tensors by ``~k``, by storage. ``departed``: the first operations of
    the program, or some in between, were not noted, and have made external tensors.
    """

    def __init__(self, record: Record, keeper: Keeper, *, departed: bool = False) -> None:
        self.record, self._departed = record, departed
        self.alive_nbytes = self.made_nbytes = 0
        self.shown: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._values: dict[int, Ref] = {}
        self._external: dict[int, int] = {}
        self._storages: dict[int, int] = {}  # by address
        self._showing: list[int] = []  # by storage, how many tensors that are watched or held show it
        self._keeper, self._addresses = keeper, keeper.addresses
        self._since = next_sequence_number()
        self.following: Following | None = None  # which may be ahead of the record

    def alive(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Values that somebody holds, by number, with their storage's number."""
        return {r.value: (t, r.storage) for r in list(self._values.values()) if (t := r()) is not None}

    def forget(self) -> None:
        """Watch no values any more, since what is alive would keep all this until cycles are collected."""
        self._values.clear()

    def of(self, tensor: torch.Tensor) -> int | None:
        """A value's number, ``~k`` for an external tensor, None for one never seen."""
        ref = self._values.get(id(tensor))
        if ref is not None and ref() is tensor:
            return ref.value
        external = self._external.get(id(tensor))
        return None if external is None else ~external

    def given(self, tensors: Sequence[torch.Tensor], k: int) -> list[int]:
        """The numbers of arguments of operation ``k``; one never seen is external. Raises GradientError where the
        program has made one in a way that no call showed."""
        values = self._values
        found: list[int] = []
        for tensor in tensors:
            ref = values.get(id(tensor))
            if ref is not None and ref() is tensor:
                if tensor._version != ref.version:
                    self.record.see(ref, tensor)
                found.append(ref.value)
            else:
                found.append(self._given_by_others(tensor))
        if self.record.switched:
            self._note_needs(k, found, tensors)
        return found

    def _note_needs(self, k: int, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Which external tensors need a gradient in operation ``k`` and did not at first, or the other way round."""
        record, needs = self.record, dict[int, bool]()
        for number, tensor in zip(numbers, tensors, strict=True):
            if number < 0 and tensor.requires_grad != (one := record.externals[~number]).requires:
                needs[number] = tensor.requires_grad
                one.takes = True
        record.needs.pop(k, None)  # a call before it may have made nothing
        if needs:
            record.needs[k] = needs

    def _given_by_others(self, tensor: torch.Tensor) -> int:
        external = self._external.get(id(tensor))
        if external is None:
            return self._from_outside(tensor, looks_of((tensor,)), self.storage_of(tensor), len(self.record.calls))
        one = self.record.externals[external]
        if tensor._version != one.version:
            self.record.see(one, tensor)
        return ~external

    def made(self, tensor: torch.Tensor, k: int) -> int:
        """The number of a result of operation ``k``: a new value, or an argument given back."""
        known = self.of(tensor)
        if known is not None:
            self.used((known,), k)
            return known
        return self.new(tensor, k)

    def new(self, tensor: torch.Tensor, k: int) -> int:
        """The number of a tensor made by operation ``k``."""
        record = self.record
        value, storage = len(record.birth), self.storage_of(tensor)
        self._watch(tensor, value, storage, k, tensor._version)
        record.birth.append(k)
        record.last_use.append(k)
        record.death.append(ALIVE)
        record.cotangent_nbytes.append(nbytes_of(tensor) if tensor.requires_grad else 0)
        record.storage.append(storage)
        return value

    def gained(self, k: int, written: Iterable[torch.Tensor]) -> None:
        """Operation ``k`` has written into these: they, or what they are views of, may need a gradient from now on."""
        record = self.record
        for tensor in written:
            base = tensor._base if tensor._is_view() else None
            for one in (tensor,) if base is None else (tensor, base):
                number = self.of(one) if one.requires_grad else None
                if number is not None and number >= 0 and not record.cotangent_nbytes[number]:
                    record.cotangent_nbytes[number] = nbytes_of(one)
                    record.gained[number] = k

    def _watch(self, tensor: torch.Tensor, value: int, storage: int, k: int, version: int) -> None:
        key = id(tensor)
        ref = self._values[key] = Ref(tensor, self._died)
        ref.id, ref.value, ref.storage, ref.version, ref.at = key, value, storage, version, k
        if not self._showing[storage]:
            nbytes = self.record.storage_nbytes[storage]
            self.alive_nbytes += nbytes
            self.made_nbytes += nbytes
        self._showing[storage] += 1

    def watch(self, tensor: torch.Tensor, value: int, storage: int, k: int, version: int) -> None:
        """``tensor`` is a value that the record knows, and had this version at operation ``k``. Raises GradientError
        where it shows the memory of another storage."""
        address = address_of(tensor)
        if self._storages.setdefault(address, storage) != storage:
            raise unshown(tensor, None)
        self._addresses[storage] = address
        self._watch(tensor, value, storage, k, version)

    def used(self, numbers: Iterable[int], k: int) -> None:
        """Operation ``k`` uses values and external tensors."""
        last_use, externals = self.record.last_use, self.record.externals
        for number in numbers:
            if number >= 0:
                last_use[number] = k
            else:
                externals[~number].last_use = k

    def storage_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, a new one where nothing alive shows it."""
        address = address_of(tensor)
        number = self._storages.get(address)
        if number is None:
            number = self._storages[address] = len(self._showing)
            self._showing.append(0)
            self._addresses[number] = address
            self.record.storage_nbytes.append(storage_nbytes(tensor.untyped_storage()) if address >= 0 else 0)
            self.record.storage_external.append(0)
        return number

    def know_storages(self, count: int, nbytes: Sequence[int]) -> None:
        """There are ``count`` storages, of which these are the ``nbytes``."""
        more = count - len(self._showing)
        if more > 0:
            self.record.storage_nbytes.extend(nbytes[len(self._showing) : count])
            self.record.storage_external.extend(bytes(more))
            self._showing += [0] * more

    def retire(self, tensor: torch.Tensor) -> None:
        """It has other memory from here on: what was used of it so far is another external tensor."""
        number = self._external.pop(id(tensor), None)
        if number is not None:
            one = self.record.externals[number]
            one.tensor = one.held
            self.shown[one.storage] = [(k, one.held if k == ~number else t) for k, t in self.shown[one.storage]]

    def unnoted(self) -> None:
        """Operations up to here were not noted."""
        self._departed = self.record.departed = True
        self._since = next_sequence_number()

    def give_to_others(self, value: torch.Tensor) -> None:
        """A tensor of others has now the memory of ``value``."""
        storage, record = self.storage_of(value), self.record
        if self._showing[storage] and not record.storage_external[storage]:
            self.alive_nbytes -= record.storage_nbytes[storage]
            record.storage_external[storage] = OTHERS
        record.handed_over.setdefault(storage, len(record.calls))

    def storage_at(self, address: int) -> int | None:
        """The number of the storage there, None where nothing alive shows one (see `address_of`)."""
        return self._storages.get(address)

    def _from_outside(self, tensor: torch.Tensor, looks: int, storage: int, k: int) -> int:
        if tensor.is_inference():
            raise InputError(
                f"Program: a tensor of shape {tuple(tensor.shape)} was made in inference mode, so writes into it "
                "cannot be detected; clone() it outside of inference mode, or make it under torch.no_grad()"
            )
        node = tensor.grad_fn
        # After a write another node is that of all that shows what was written, of views when they are next looked at.
        earlier = self._departed and (tensor._is_view() or storage in self.record.writes)
        if node is not None and node._sequence_nr() >= self._since and not earlier:
            raise unshown(tensor, node.name())
        number, record = self._external_in(tensor, storage, looks, tensor._version, k), self.record
        if not tensor.requires_grad and foreign(tensor):
            record.arrays.outside(storage, tensor)
        if storage in record.writes:
            self._keeper.also_shown(storage, number, tensor, record)
        return number

    def outside(self, tensor: torch.Tensor, storage: int, address: int, looks: int, version: int, k: int) -> None:
        """``tensor``, a leaf, has been external since operation ``k``, and nothing had written into the memory that it
        shows. Raises GradientError where that is the program's own."""
        if self._storages.setdefault(address, storage) != storage:
            raise unshown(tensor, None)
        self._addresses[storage] = address
        self._external_in(tensor, storage, looks, version, k)

    def _external_in(self, tensor: torch.Tensor, storage: int, looks: int, version: int, k: int) -> int:
        """The number, ``~k``, of a new external tensor."""
        record, requires = self.record, tensor.requires_grad
        if self._showing[storage] and not record.storage_external[storage]:
            raise unshown(tensor, None)
        parameter = tensor.is_leaf and requires
        record.storage_external[storage] = MAYBE_OWN if self._departed and not parameter else OTHERS
        self._showing[storage] += 1
        self._external[id(tensor)] = number = len(record.externals)
        self.shown.setdefault(storage, []).append((~number, tensor))
        found = External(tensor, storage, tensor.is_leaf, tensor.detach(), version, k, requires, requires, -1, k, looks)
        found.steps = fused_steps(tensor)
        record.externals.append(found)
        return ~number

    def _died(self, ref: Ref) -> None:
        if self._values.get(ref.id) is ref:
            del self._values[ref.id]
        following = self.following
        self.record.death[ref.value] = len(self.record.calls) if following is None else following.k
        address = self._addresses.get(ref.storage)
        if address is not None:
            self._showing[ref.storage] -= 1
            if not self._showing[ref.storage]:
                del self._storages[address], self._addresses[ref.storage]
                if not self.record.storage_external[ref.storage]:
                    self.alive_nbytes -= self.record.storage_nbytes[ref.storage]
