"""`Moves`: restart checkpoints and saved tensors of one call on their way below the device, and back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from typing import TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tapestream.executor.program.calls.values import address_of
from tapestream.executor.program.record.keeper import Entry, Kept
from tapestream.executor.program.record.record import Record
from tapestream.executor.program.record.tape import Saved
from tapestream.executor.travel.parcel import Parcels
from tapestream.ir import Free, Kind, Offload, Prefetch, Tier, Value, Wait

Reads: TypeAlias = tuple[bool, bool]
"""Whether backward of a stretch reads the state before it, and the one after it, as states of the plan."""
_FIRST = Value(Kind.STATE, 0)
_NOTHING = torch.empty(0, device="cpu")


class Spoilt(Exception):
    """Somebody has written into what was on its way: the plan is of no use."""


class Moves:
    """See `StageMover`. ``cuts``: where stretches begin; ``saved``: see `Tape`; ``reads``: by
    stretch whose saved tensors move; states that it reads are no part of these. ``kept``: the restart checkpoint before
    a stretch, None where there is none any more.

    An operation that says what it writes into waits for the copies of that (see `written`). Where something else
    has written into what was being copied, the copy is of no use, and the call goes on without its plan (see `Spoilt`).
    """

    def __init__(
        self,
        parcels: Parcels,
        record: Record,
        device: torch.device,
        cuts: Sequence[int],
        saved: dict[int, Saved],
        reads: Mapping[int, Reads],
    ) -> None:
        self.parcels, self._record, self._device = parcels, record, device
        self._cuts, self._saved, self.reads = cuts, saved, reads
        self.kept: Callable[[int], Kept | None] = lambda stage: None
        self.left_until = 0
        """What operations before this one have saved is not all on the device."""
        self._states: dict[int, dict[int, StorageWeakRef]] = {}  # by stretch, the storages of the state before it
        self._external: set[int] = set()  # addresses of the storages of external tensors, the first `_seen` of them
        self._seen = 0
        self._leaving: dict[Value, tuple[Tier, Saved]] = {}  # what is being copied from the device, with versions
        self._waited: set[Value] = set()  # earlier than the plan says
        self.spoilt = False
        """Something that was on its way has been written into."""
        self._travels: dict[Value, list[bool]] = {}  # of each tensor, in their order
        self._entries: dict[int, list[tuple[int, int, bool]]] = {}  # by stretch: number, storage, need of a gradient
        self._places: dict[int, list[tuple[int, int]]] = {}  # by stretch: operation, place
        self._rest: dict[int, dict[int, Saved]] = {}  # by stretch and operation, with gaps for what is away

    def border(self, stage: int, state: Iterable[torch.Tensor]) -> None:
        """Stretch ``stage`` is about to run, or the one before it has; ``state`` is there now."""
        # Weakly: the program may be done with it soon, and no other storage gets its address meanwhile.
        shown = [t for t in state if t.layout is torch.strided]
        self._states[stage] = {address_of(t): StorageWeakRef(t.untyped_storage()) for t in shown}  # type: ignore[no-untyped-call]
        self._states.pop(stage - 2, None)

    def obey(self, action: Offload | Prefetch | Wait | Free) -> bool:
        """What the first sweep does on its way. Whether all is well: nothing has written into what was on its way."""
        with suppress(Spoilt):
            match action:
                case Offload(value, source, target) | Prefetch(value, source, target):
                    self.start(value, source, target)
                case Wait(value, tier):
                    self.wait(value, tier)
                case Free(value, tier):
                    self.free(value, tier)
        return not self.spoilt

    def holds(self, value: Value) -> bool:
        """See `StageMover`. The state before the first stretch always stays, for whoever asks in another order."""
        return value == _FIRST or self.parcels.holds(value)

    def start(self, value: Value, source: Tier, target: Tier) -> None:
        """Start a copy. Raises Spoilt if the value is not what it was when it was kept."""
        if not self._moves(value):
            return
        if source is Tier.DEVICE and not self._pack(value, target):
            raise Spoilt
        self.parcels.start(value, source, target)

    def wait(self, value: Value, tier: Tier) -> None:
        """Until the copy is there. Raises Spoilt if something was written into while it was copied."""
        if not self._moves(value):
            return
        if tier is Tier.DEVICE:
            self.parcels.wait(value, tier)
            self._came(value, self.parcels.unpack(value))
        elif value in self._waited:
            self._waited.discard(value)
        else:
            self._wait(value, tier)
        if self.spoilt:
            raise Spoilt

    def free(self, value: Value, tier: Tier) -> None:
        """Drop a copy. Saved tensors of which there is no other go when backward has used them."""
        if not self._moves(value):
            return
        if tier is not Tier.DEVICE:
            self.parcels.free(value, tier)
        elif self.parcels.holds(value):
            self._leave(value)

    def _moves(self, value: Value) -> bool:
        if self.spoilt:
            raise Spoilt
        return value != _FIRST

    def reversed(self, stage: int) -> None:
        """A stretch is about to be reversed, the last use of what it has saved."""
        self.parcels.drop(Value(Kind.SAVED, stage))

    def written(self, tensors: Sequence[torch.Tensor]) -> None:
        """An operation is about to write into these, or has without saying so."""
        self.parcels.written(tensors)
        if self._leaving:
            addresses = {address_of(t) for t in tensors}
            for value, (tier, read) in list(self._leaving.items()):
                if any(address_of(t) in addresses for t, _ in read):
                    self._wait(value, tier)
                    self._waited.add(value)

    def abandon(self) -> list[int]:
        """Drop all copies; what has no other is gone. Gives the operations of the restart checkpoints concerned."""
        self.spoilt, concerned = True, [self._cuts[stage] for stage in self._entries]
        self.parcels.close()
        for table in (self._leaving, self._travels, self._entries, self._places, self._rest, self._states):
            table.clear()
        return concerned

    # -- leaving --------------------------------------------------------------------------------------------------

    def _pack(self, value: Value, target: Tier) -> bool:
        """Whether it is what it was when it was kept."""
        k, device = value.index, self._device
        if value.kind is Kind.STATE:
            kept = self.kept(k)
            entries = {} if kept is None else kept.entries
            read = [(entry.tensor, entry.version) for entry in entries.values()]
            self.spoilt |= kept is None or any(tensor._version != version for tensor, version in read)
            outside = (e for e in entries.values() if self._record.storage_external[e.storage] and not e.private)
            staying = {address_of(entry.tensor) for entry in outside}
        else:
            places, read = self._clean(k)
            before, after = (self._states.get(k + i, {}) if reads else {} for i, reads in enumerate(self.reads[k]))
            staying = self._externals() | before.keys() | after.keys()
        if not self.spoilt:
            tensors = [tensor for tensor, _ in read]
            travels = self.parcels.pack(value, tensors, lambda t, head: head in staying or t.device != device)
            self._travels[value] = travels
            if value.kind is Kind.STATE:
                all_entries = ((number, entry.storage, entry.requires) for number, entry in entries.items())
                self._entries[k] = list(compress(all_entries, travels))
            else:
                self._places[k] = list(compress(places, travels))
            self._leaving[value] = target, list(compress(read, travels))
        return not self.spoilt

    def _clean(self, stage: int) -> tuple[list[tuple[int, int]], Saved]:
        """What a stretch has saved that nothing has written into since; of all else backward is to say so."""
        places, found = list[tuple[int, int]](), list[tuple[torch.Tensor, int]]()
        for operation in range(self._cuts[stage], self._cuts[stage + 1]):
            for place, (tensor, version) in enumerate(self._saved.get(operation, ())):
                if tensor._version == version:
                    places.append((operation, place))
                    found.append((tensor, version))
        return places, found

    def _externals(self) -> set[int]:
        self._external.update(address_of(one.tensor) for one in self._record.externals[self._seen :])
        self._seen = len(self._record.externals)
        return self._external

    def _wait(self, value: Value, tier: Tier) -> None:
        """For a copy to a slower tier."""
        self.parcels.wait(value, tier)
        _, read = self._leaving.pop(value, (tier, list[tuple[torch.Tensor, int]]()))
        void = value.kind is Kind.STATE and self.kept(value.index) is None
        self.spoilt |= void or any(tensor._version != version for tensor, version in read)

    def _leave(self, value: Value) -> None:
        """Its bytes on the device go."""
        k = value.index
        if value.kind is Kind.STATE:
            if (kept := self.kept(k)) is not None:  # others may show the same entries, as the live state
                gone = {number for number, *_ in self._entries[k]}
                kept.entries = {number: entry for number, entry in kept.entries.items() if number not in gone}
            return
        first, end = self._cuts[k], self._cuts[k + 1]
        rest = self._rest[k] = {o: self._saved.pop(o) for o in range(first, end) if o in self._saved}
        for operation, place in self._places[k]:
            rest[operation][place] = (_NOTHING, 0)
        self.left_until = max(self.left_until, end)

    def _came(self, value: Value, tensors: Iterable[torch.Tensor]) -> None:
        k, tensors = value.index, compress(tensors, self._travels[value])
        if value.kind is Kind.STATE:
            kept = self.kept(k)
            assert kept is not None
            pairs = zip(self._entries[k], tensors, strict=True)
            kept.entries = kept.entries | {
                n: Entry(t, storage, requires, True, t._version) for (n, storage, requires), t in pairs
            }
            return
        rest = self._rest.pop(k)
        for (operation, place), tensor in zip(self._places.pop(k), tensors, strict=True):
            rest[operation][place] = tensor, tensor._version
        self._saved.update(rest)
