"""`Recorder`: takes note of every outermost torch call while a program runs, which is its first sweep.

The program runs under plain autograd whose saved tensors are dropped at once: its tensors look to Python, and to
kernels that ask, as they always do (flags, views, versions, leaves), and errors are PyTorch's own. Tensors live as long
as the program itself, or a restart checkpoint, holds them.
"""

import contextlib
import time
import weakref
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tapestream.errors import GradientError, InputError
from tapestream.executor.program.keeper import Keeper
from tapestream.executor.program.patterns import tensors_of
from tapestream.executor.program.record import Ambient, External, Record
from tapestream.executor.program.seams import Apply, heard_by
from tapestream.executor.program.writes import check_allowed, written
from tapestream.runner.graph import next_sequence_number
from tapestream.runner.guards import escaped

NAME = "the program"
Operation = Callable[[int, int], None]


class _Ref(weakref.ref[torch.Tensor]):
    """A value that is alive."""

    __slots__ = ("id", "storage", "value")
    id: int
    value: int
    storage: int


class Recorder(TorchFunctionMode):
    """One sweep. ``between`` is called before each operation but the first, with its number and the bytes saved for
    backward so far: the time to make a restart checkpoint."""

    def __init__(self, record: Record, keeper: Keeper, between: Operation) -> None:
        super().__init__()
        self.record, self.keeper, self.between = record, keeper, between
        self.saved_nbytes = 0
        self._values: dict[int, _Ref] = {}
        self._external: dict[int, int] = {}
        self._storages: dict[int, list[int]] = {}  # by address of the storage: its number, how many values show it
        self._counted: set[int] = set()
        self._bypassed: set[int] = set()  # storages that .data shows
        self._ambients: dict[Ambient, int] = {}
        self._epoch = 0
        self._inside = False
        self._since = next_sequence_number()
        self._seed = torch.initial_seed()
        self._kinds = ("cpu", keeper.device.type) if keeper.device.type != "cpu" else ("cpu",)
        self._saving = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the program runs."""
        with saved_tensors_hooks(self._pack, _refuse), heard_by(self), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        return self._call(func, args, kwargs)

    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `Listener`: a call of an autograd.Function."""
        if self._inside:
            return function(*args)
        if isinstance(function, Apply) and function.cls.__name__ == "BackwardHookFunction":
            raise GradientError(
                "Program: a module with a full backward hook runs inside the program, whose hook would be lost; remove "
                "the hook, or put it on a module outside"
            )
        return self._call(function, args, {})

    def seeding(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `Listener`."""
        if self._inside:
            return function(*args)
        out = self._call(function, args, {}, always=True)
        self._seed = torch.initial_seed()
        return out

    def casts_cleared(self) -> None:
        """See `Listener`."""
        self._epoch += 1

    def alive(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Values that somebody holds, by number, with their storage's number."""
        return {r.value: (t, r.storage) for r in list(self._values.values()) if (t := r()) is not None}

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
        if k:
            self.between(k, self.saved_nbytes)
        tensors: list[torch.Tensor] = []
        pattern = record.patterns.number(func, args, kwargs, tensors)
        ambient = self._ambient()
        numbers = [self._number(t) for t in tensors]
        announced = {self._storage_of(t) for t in written(func, args, kwargs) if self.number_of(t) is not None}
        for storage in announced:
            self.keeper.before_write(storage, self._externals_of(storage))
        versions = [t._version for t in tensors]
        wanted = [t.requires_grad for t in tensors]
        self._saving, start = 0, time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        changed = {self._storage_of(t) for t, v in zip(tensors, versions, strict=True) if t._version != v}
        made = tensors_of(result, [])
        fresh = [t for t in made if self.number_of(t) is None]
        flags = any(t.requires_grad != w for t, w in zip(tensors, wanted, strict=True))
        if not (fresh or changed or flags or always):
            self._look_at(func, result)
            return result
        self._check_changed(func, tensors, versions, wanted, announced)
        if changed & self._bypassed:
            raise GradientError(
                "Program: a tensor that requires a gradient was written into through its .data, which autograd does "
                "not see; write into it under torch.no_grad(), or into a clone()"
            )
        if getattr(func, "__self__", None) is torch.Tensor.data and tensors[0].requires_grad:
            self._bypassed.add(self._storage_of(tensors[0]))
        for storage in changed:
            record.writes.setdefault(storage, array("i")).append(k)
        record.calls.append(pattern)
        record.ambient.append(ambient)
        record.seconds.append(seconds)
        record.arguments.extend(numbers)
        record.argument_ends.append(len(record.arguments))
        for number in numbers:
            self._used(number, k)
        record.results.extend([self._made(t, k) for t in made])
        record.result_ends.append(len(record.results))
        record.saved.append(self._saving)
        self.saved_nbytes += self._saving
        return result

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
        if tensor.requires_grad and tensor.is_leaf:
            raise leaf_inside(tensor)
        value, storage = len(self.record.birth), self._storage_of(tensor)
        ref = _Ref(tensor, self._died)
        ref.id, ref.value, ref.storage = id(tensor), value, storage
        self._values[id(tensor)] = ref
        self._share(tensor, +1)
        self.record.birth.append(k)
        self.record.last_use.append(k)
        self.record.storage.append(storage)
        return value

    def _died(self, ref: Any) -> None:
        assert isinstance(ref, _Ref)
        if self._values.get(ref.id) is ref:
            del self._values[ref.id]
        address = self._addresses.get(ref.storage)
        if address is not None:
            entry = self._storages[address]
            entry[1] -= 1
            if not entry[1]:
                del self._storages[address], self._addresses[ref.storage]

    def _number(self, tensor: torch.Tensor) -> int:
        """The number of an argument; one never seen is external."""
        known = self.number_of(tensor)
        if known is not None:
            return known
        node = tensor.grad_fn
        if node is not None and node._sequence_nr() >= self._since:
            raise GradientError(
                f"Program: a tensor of shape {tuple(tensor.shape)} was made inside the program by {node.name()}, which "
                "no torch call showed (a C++ extension, say); wrap that call in a torch.autograd.Function"
            )
        address = _address(tensor)
        inside = address in self._storages and not self.record.storage_external[self._storages[address][0]]
        if inside:
            raise GradientError(
                f"Program: a tensor of shape {tuple(tensor.shape)} shows memory of a tensor made inside the program, "
                "and no torch call showed how; clone() it"
            )
        storage = self._storage_of(tensor)
        self.record.storage_external[storage] = 1
        self._share(tensor, +1)
        self._external[id(tensor)] = k = len(self.record.externals)
        self.record.externals.append(External(tensor, storage, tensor.is_leaf))
        self.keeper.found(k, storage)
        return ~k

    # -- storages -------------------------------------------------------------------------------------------------

    @property
    def _addresses(self) -> dict[int, int]:
        return self.keeper.addresses

    def _storage_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, a new one where nothing alive shows it."""
        address = _address(tensor)
        entry = self._storages.get(address)
        if entry is not None:
            return entry[0]
        number = len(self.record.storage_nbytes)
        self._storages[address] = [number, 0]
        self._addresses[number] = address
        self.record.storage_nbytes.append(tensor.untyped_storage().nbytes() if address >= 0 else 0)
        self.record.storage_external.append(0)
        return number

    def _share(self, tensor: torch.Tensor, by: int) -> None:
        self._storages[_address(tensor)][1] += by

    def _externals_of(self, storage: int) -> list[tuple[int, torch.Tensor]]:
        if not self.record.storage_external[storage]:
            return []
        return [(~k, e.tensor) for k, e in enumerate(self.record.externals) if e.storage == storage]

    # -- what a call did ------------------------------------------------------------------------------------------

    def _check_changed(
        self, func: Any, tensors: list[torch.Tensor], versions: list[int], wanted: list[bool], announced: set[int]
    ) -> None:
        """Refuse writes into tensors of others that a replay could not honour; forget restart checkpoints that an
        unannounced write has spoilt."""
        name = getattr(func, "__name__", str(func))
        for tensor, version, before in zip(tensors, versions, wanted, strict=True):
            written, flag = tensor._version != version, tensor.requires_grad != before
            if not (written or flag):
                continue
            number, storage = self.number_of(tensor), self._storage_of(tensor)
            if self.record.storage_external[storage] and (before or tensor.requires_grad or flag):
                raise GradientError(
                    f"Program: {name} changed in place a tensor of shape {tuple(tensor.shape)} that the program did "
                    "not make and that requires a gradient; clone() it inside the program first"
                )
            if flag and tensor.is_leaf and tensor.requires_grad:
                raise leaf_inside(tensor)
            if written and storage not in announced:
                if self.record.storage_external[storage]:
                    raise GradientError(
                        f"Program: {name} wrote into a tensor of shape {tuple(tensor.shape)} that the program did not "
                        f"make, without saying so; clone() it inside the program (number {number})"
                    )
                self.keeper.spoilt(storage)

    def _look_at(self, func: Any, result: Any) -> None:
        if getattr(func, "__name__", "") == "__get__" and isinstance(result, torch.autograd.graph.Node):
            raise GradientError(
                "Program: the program reads .grad_fn of a tensor; hooks on it would be lost, since gradients are made "
                "by replays; ask for requires_grad instead"
            )

    def _ambient(self) -> int:
        if torch.is_inference_mode_enabled():
            raise InputError("Program: inference mode is entered inside the program; use torch.no_grad() instead")
        if torch.initial_seed() != self._seed:
            raise GradientError(
                "Program: torch's random generator was set inside the program in a way that cannot be seen; use "
                "torch.manual_seed() or torch.set_rng_state()"
            )
        casts = tuple(
            (kind, on, torch.get_autocast_dtype(kind) if on else None)
            for kind in self._kinds
            for on in (torch.is_autocast_enabled(kind),)
        )
        now = Ambient(
            torch.is_grad_enabled(), casts, torch.is_autocast_cache_enabled(), torch.get_default_dtype(), self._epoch
        )
        found = self._ambients.get(now)
        if found is None:
            found = self._ambients[now] = len(self.record.ambients)
            self.record.ambients.append(now)
        return found

    def _pack(self, tensor: torch.Tensor) -> None:
        """Count what backward would have kept, and drop it. A storage counts at the operation that saves it first."""
        if self._inside:
            entry = self._storages.get(_address(tensor))
            if entry is None:
                self._saving += tensor.nbytes if tensor.layout is torch.strided else 0
            elif entry[0] not in self._counted and not self.record.storage_external[entry[0]]:
                self._counted.add(entry[0])
                self._saving += tensor.untyped_storage().nbytes()


def leaf_inside(tensor: torch.Tensor) -> GradientError:
    """A leaf made inside the program."""
    return GradientError(
        f"Program: a tensor of shape {tuple(tensor.shape)} made inside the program is asked to require a gradient; its "
        ".grad would be lost. Make it before the call and pass it, or leave requires_grad out"
    )


def _refuse(nothing: None) -> torch.Tensor:
    raise escaped(NAME)


def _address(tensor: torch.Tensor) -> int:
    """What tells storages that are alive at the same time apart; a negative number where there is none."""
    if tensor.layout is not torch.strided:
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)
