"""`Recorder`: takes note of every outermost torch call while a program runs, which is its first sweep.

The program runs under plain autograd and its graph stays: only what nodes save is replaced by a number (see `Tape`). So
its tensors look to Python, and to kernels that ask, as they always do, hooks and sums of gradients are plain autograd's
own, and errors are PyTorch's. Tensors live as long as the program itself, the tape or a restart checkpoint holds them.
"""

import contextlib
import functools
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tapestream.errors import GradientError
from tapestream.executor.program.ambients import Ambients, unshown
from tapestream.executor.program.generators import Draws
from tapestream.executor.program.hidden import Hidden
from tapestream.executor.program.keeper import Keeper
from tapestream.executor.program.patterns import tensors_of
from tapestream.executor.program.record import ALIVE, External, Record, look
from tapestream.executor.program.seams import heard_by
from tapestream.executor.program.tape import Handle, Tape, handle
from tapestream.executor.program.trials import Trials
from tapestream.executor.program.values import Ref, address_of, nbytes_of
from tapestream.executor.program.writes import check_allowed, check_changed, written
from tapestream.runner.ambient import cuda_in_use
from tapestream.runner.graph import next_sequence_number

Operation = Callable[[int, int], None]


class Recorder(TorchFunctionMode):
    """One sweep. ``between`` is called before each operation, with its number and the bytes saved for backward so far:
    the time to make a restart checkpoint, and to say whether saved tensors are to be kept from here on (``taking``).

    ``alive_nbytes``: of what the program has made and still holds. ``next_nbytes``: what the next operation is to
    take, with what it makes and saves, as far as that can be known. ``spare`` says whether so many bytes may be used
    for a moment.
    """

    only_watches = True
    spare: Callable[[int], bool] = staticmethod(lambda nbytes: True)

    def __init__(self, record: Record, keeper: Keeper, tape: Tape, between: Operation) -> None:
        super().__init__()
        self.record, self.keeper, self.tape, self.between = record, keeper, tape, between
        self.taking = True
        self.saved_nbytes = self.alive_nbytes = self.next_nbytes = self._largest_nbytes = 0
        self._values: dict[int, Ref] = {}
        self._external: dict[int, int] = {}
        self._shown: dict[int, list[tuple[int, torch.Tensor]]] = {}  # external tensors by number, by storage
        self._storages: dict[int, list[int]] = {}  # by address of the storage: its number, how many values show it
        self._counted = bytearray()  # by storage, whether its bytes are among those saved
        self._bypassed: set[int] = set()  # storages that .data shows
        self._epoch = 0
        self._inside = False
        self._hidden: Hidden | None = None
        self._trials = Trials(record.kinds, keeper.device)
        self._since = next_sequence_number()
        kinds = {"cpu": 0, keeper.device.type: 0, **({"cuda": 0} if cuda_in_use() else {})}
        self._ambients, self._draws = Ambients(record.ambients, tuple(kinds)), Draws(record)
        self._packs = self._look = self._made_nbytes = 0
        self._unknown: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the program runs."""
        here = [self]  # the graph holds both hooks as long as it lives: it must not hold all this

        def pack(tensor: torch.Tensor) -> Handle:
            return here[0]._pack(tensor)

        try:
            with saved_tensors_hooks(pack, self.tape.unpack), heard_by(self), self:
                yield
        finally:
            here.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            if self._hidden is not None:
                self._hidden.see(func, args, kwargs)
            return func(*args, **kwargs)
        return self._call(func, args, kwargs)

    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `Listener`: a call of an autograd.Function."""
        if self._inside:
            return function(*args)
        self._hidden, k = Hidden(), len(self.record)
        try:
            out = self._call(function, args, {})
            self._inside = True
            if len(self.record) > k:
                if self._hidden.end(tensors_of((args, out), [])):
                    self.record.spoilt = f"running statistics were written into by {function.__name__}"
                self.record.hidden[k] = self._hidden
            return out
        finally:
            self._hidden, self._inside = None, False

    def plain(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `Listener`."""
        if self._inside:
            return function(*args)
        return self._call(function, args, {}, always=True)

    def casts_cleared(self) -> None:
        """See `Listener`."""
        self._epoch += 1

    def alive(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Values that somebody holds, by number, with their storage's number."""
        return {r.value: (t, r.storage) for r in list(self._values.values()) if (t := r()) is not None}

    def forget(self) -> None:
        """At the end: watch no values any more, since what is alive would keep all this until cycles are collected."""
        self._values.clear()
        self._begin(len(self.record))  # a last call may have failed

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """A value's number, ``~k`` for an external tensor, None for one never seen."""
        ref = self._values.get(id(tensor))
        if ref is not None and ref() is tensor:
            return ref.value
        external = self._external.get(id(tensor))
        return None if external is None else ~external

    # -- one call -------------------------------------------------------------------------------------------------

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any], *, always: bool = False) -> Any:
        self._inside = True
        try:
            check_allowed(func, args)
            return self._noted(func, args, kwargs, always)
        finally:
            self._inside = False

    def _noted(self, func: Any, args: Any, kwargs: dict[str, Any], always: bool) -> Any:
        record, k = self.record, len(self.record)
        tensors: list[torch.Tensor] = []
        pattern = record.patterns.of(func, args, kwargs, tensors)
        kind = pattern.kind, *[(t.shape, t.dtype, t.requires_grad) for t in tensors]
        self.next_nbytes = self._trials.expected(kind, tensors, self._largest_nbytes)
        self.between(k, self.saved_nbytes)
        ambient = self._ambients.now(self._epoch)
        numbers = [self._number(t) for t in tensors]
        announced = {self._storage_of(t) for t in written(func, args, kwargs) if self.number_of(t) is not None}
        for storage in announced:
            self.keeper.before_write(storage, self._shown.get(storage, []))
        versions = [t._version for t in tensors]
        wanted = [t.requires_grad for t in tensors]
        self._begin(k)
        if self._hidden is not None:
            self._hidden.begin(pattern.foreign)
        before = self._draws.before(pattern, func)
        start = time.perf_counter()
        result = self._trials.run(kind, functools.partial(func, *args, **kwargs))
        seconds = time.perf_counter() - start
        # Running statistics are written into without a new version.
        changed = announced.union(
            self._storage_of(t) for t, v in zip(tensors, versions, strict=True) if t._version != v
        )
        made = tensors_of(result, [])
        gradient = getattr(func, "__self__", None) is torch.Tensor.grad  # not made here: external where it is used
        fresh = [] if gradient else [t for t in made if self.number_of(t) is None]
        flags = any(t.requires_grad != w for t, w in zip(tensors, wanted, strict=True))
        noted = bool(fresh or changed or flags or always)
        like = pattern if noted else None if made else func
        if not (self._draws.after(before, func, like) or noted):
            self._begin(k)
            return result
        for storage in check_changed(
            func, tensors, versions, wanted, self._storage_of, record.storage_external, announced
        ):
            self.keeper.spoilt(storage)
        self._check_bypassed(func, tensors, changed)
        for storage in changed:
            record.writes.setdefault(storage, array("i")).append(k)
        record.calls.append(record.patterns.number(pattern, fresh))
        record.ambient.append(ambient)
        record.seconds.append(seconds)
        record.arguments.extend(numbers)
        record.argument_ends.append(len(record.arguments))
        for number in numbers:
            self._used(number, k)
        record.results.extend([self._made(t, k) for t in made])
        record.result_ends.append(len(record.results))
        self._saved()
        into = {id(t) for t in tensors if announced and self._storage_of(t) in announced}
        shown = any(t.requires_grad for t in (*fresh, *tensors))
        taken = self._trials.note(record, kind, tensors, wanted, into, self._made_nbytes, self.spare if shown else None)
        self._largest_nbytes = max(self._largest_nbytes, taken)
        return result

    def _check_bypassed(self, func: Any, tensors: list[torch.Tensor], changed: set[int]) -> None:
        if changed & self._bypassed:
            raise GradientError(
                "Program: a tensor that requires a gradient was written into through its .data, which autograd does "
                "not see; write into it under torch.no_grad(), or into a clone()"
            )
        if getattr(func, "__self__", None) is torch.Tensor.data and tensors[0].requires_grad:
            self._bypassed.add(self._storage_of(tensors[0]))

    def _begin(self, k: int) -> None:
        """Nothing has been saved in operation ``k`` so far."""
        record = self.record
        del record.saves[record.save_ends[k - 1] if k else 0 :]
        self._packs = self._look = self._made_nbytes = 0
        self._unknown.clear()
        self.tape.saved.pop(k, None)

    def _used(self, number: int, k: int) -> None:
        if number >= 0:
            self.record.last_use[number] = k
        else:
            self.record.externals[~number].last_use = k

    def _made(self, tensor: torch.Tensor, k: int) -> int:
        """The number of a result: a new value, or an argument given back."""
        known = self.number_of(tensor)
        if known is not None:
            self._used(known, k)
            return known
        value, storage = len(self.record.birth), self._storage_of(tensor)
        ref = Ref(tensor, self._died)
        ref.id, ref.value, ref.storage, ref.version, ref.at = id(tensor), value, storage, tensor._version, k
        self._values[id(tensor)] = ref
        entry = self._storages[address_of(tensor)]
        if not entry[1]:
            self.alive_nbytes += self.record.storage_nbytes[storage]
            self._made_nbytes += self.record.storage_nbytes[storage]
        entry[1] += 1
        self.record.birth.append(k)
        self.record.last_use.append(k)
        self.record.death.append(ALIVE)
        self.record.cotangent_nbytes.append(nbytes_of(tensor) if tensor.requires_grad else 0)
        self.record.storage.append(storage)
        return value

    def _died(self, ref: Any) -> None:
        assert isinstance(ref, Ref)
        if self._values.get(ref.id) is ref:
            del self._values[ref.id]
        self.record.death[ref.value] = len(self.record)
        address = self._addresses.get(ref.storage)
        if address is not None:
            entry = self._storages[address]
            entry[1] -= 1
            if not entry[1]:
                del self._storages[address], self._addresses[ref.storage]
                self.alive_nbytes -= self.record.storage_nbytes[ref.storage]

    def _number(self, tensor: torch.Tensor) -> int:
        """The number of an argument; one never seen is external."""
        known = self.number_of(tensor)
        if known is not None:
            self.record.see(self._values[id(tensor)] if known >= 0 else self.record.externals[~known], tensor)
            return known
        node = tensor.grad_fn
        if node is not None and node._sequence_nr() >= self._since:
            raise unshown(tensor, node.name())
        address = address_of(tensor)
        inside = address in self._storages and not self.record.storage_external[self._storages[address][0]]
        if inside:
            raise unshown(tensor, None)
        storage = self._storage_of(tensor)
        self.record.storage_external[storage] = 1
        self._storages[address][1] += 1
        self._external[id(tensor)] = k = len(self.record.externals)
        self._shown.setdefault(storage, []).append((~k, tensor))
        at = len(self.record)
        self.record.externals.append(
            External(tensor, storage, tensor.is_leaf, tensor.detach(), tensor._version, at, tensor.requires_grad)
        )
        return ~k

    # -- storages -------------------------------------------------------------------------------------------------

    @property
    def _addresses(self) -> dict[int, int]:
        return self.keeper.addresses

    def _storage_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, a new one where nothing alive shows it."""
        address = address_of(tensor)
        entry = self._storages.get(address)
        if entry is not None:
            return entry[0]
        number = len(self.record.storage_nbytes)
        self._storages[address] = [number, 0]
        self._addresses[number] = address
        self.record.storage_nbytes.append(tensor.untyped_storage().nbytes() if address >= 0 else 0)
        self.record.storage_external.append(0)
        self._counted.append(0)
        return number

    # -- what a call did ------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Handle:
        """Keep what is saved or drop it, and count its bytes: a storage's at the operation that saves it first."""
        if not self._inside:
            return (
                tensor.detach(),
                tensor._version,
            )  # by an operation that no torch call showed: nothing could make it again
        operation, place = len(self.record), self._packs
        self._packs, self._look = self._packs + 1, look(self._look, tensor)
        if self.taking:
            self.tape.saved.setdefault(operation, []).append((tensor.detach(), tensor._version))
        entry = self._storages.get(address_of(tensor))
        if entry is None:  # held until the operation ends, so that addresses tell its results from what it does inside
            self._unknown[address_of(tensor)] = tensor.detach()
        else:
            self._count(entry[0])
        return handle(operation, place)

    def _count(self, storage: int) -> None:
        """Autograd has saved something of a storage."""
        if self.record.storage_external[storage]:
            return
        self.record.saves.append(storage)
        if not self._counted[storage]:
            self._counted[storage] = 1
            self.saved_nbytes += self.record.storage_nbytes[storage]

    def _saved(self) -> None:
        """What the operation has saved, now that its results are known."""
        record, inner = self.record, 0
        for address, tensor in self._unknown.items():
            entry = self._storages.get(address)
            if entry is not None:
                self._count(entry[0])
            elif tensor.layout is torch.strided:
                inner += tensor.untyped_storage().nbytes()
        self._unknown.clear()
        record.save_ends.append(len(record.saves))
        record.packs.append(self._packs)
        record.looks.append(self._look)
        record.inner_nbytes.append(inner)
        self.saved_nbytes += inner
