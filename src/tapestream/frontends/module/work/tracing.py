"""`Tracing`: a function mode that traces what runs between the blocks of a call."""

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from tapestream.errors import GradientError
from tapestream.executor.program.calls.writes import written
from tapestream.frontends.module.homes.between import BetweenBlocks, is_about_itself
from tapestream.frontends.module.work.operation import Constant, Operation, Source, Value, mapped
from tapestream.frontends.module.work.work import Work
from tapestream.runner.ambient import Autocast, TorchGenerators
from tapestream.runner.guards import written_since_saved
from tapestream.runner.kernels import KERNELS, ON_CPU
from tapestream.runner.modes import Surroundings, dispatching, saving_entered
from tapestream.runner.state import storages, tensors_in

_WRITES = "writes into a tensor"
_ELSEWHERE = (
    "runs in a mode or transform, with hooks on saved tensors, on a tensor of another class, or draws from a generator "
    "of its own"
)
_REPLACE = ("__set__", "__delete__", "detach_", "requires_grad_")  # what a tensor is
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Again(Protocol):
    """What runs a block of a call again, and the work behind it: a `StreamCall`."""

    def record_for_backward(self, segment: int, k: int) -> None: ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Saved:
    """A tensor that autograd has saved between blocks. ``tensor`` None: it was dropped, and is at ``place`` of ``work``
    when it has been made again."""

    tensor: torch.Tensor | None
    version: int
    looks: tuple[torch.Size, torch.dtype, torch.device]
    place: tuple[int, int] = (0, 0)
    work: Work | None = None
    again: "weakref.ref[Again] | None" = None

    def unpacked(self) -> torch.Tensor:
        """It, for its backward."""
        if self.tensor is not None:
            if self.tensor._version != self.version:
                raise written_since_saved("the model, between two blocks,")
            return self.tensor
        assert self.work is not None
        if self.place not in self.work.saved:
            again = None if self.again is None else self.again()
            if again is None:
                raise GradientError("the call that this tensor belongs to has ended; run the forward again")
            again.record_for_backward(*self.work.place)
        found = self.work.saved.get(self.place)
        if found is None:
            raise GradientError(
                "backward came between two blocks a second time; the saved tensors are gone after one backward "
                "(retain_graph=True is not supported), run the forward again"
            )
        if (found.shape, found.dtype, found.device) != self.looks:
            raise GradientError("what the model does between two blocks saved other tensors when it was run again")
        return found


@dataclass(slots=True)
class _Named:
    tensor: weakref.ref[torch.Tensor]
    version: int
    number: int


class Size(NamedTuple):
    """Of a value: the number of its storage, and its address and bytes."""

    storage: int
    address: int
    nbytes: int


class Tracing(BetweenBlocks):
    """Traces functions of tensors that come from the last block into its `Work`; everything else runs as it is.

    A function is left out of the trace, and what it makes is unknown, where it writes into a tensor, runs under
    transforms of `torch.func`, somebody's dispatch mode or hooks on saved tensors, with other switches of kernels than
    the call began with, or on tensors of other classes. ``again``: weakly held by what is saved.
    """

    def __init__(self, device: torch.device, again: "weakref.ref[Again] | None" = None) -> None:
        super().__init__()
        self._device, self._again = device, again
        self._surroundings = Surroundings(on_cpu=device.type == "cpu")
        self._switches = ON_CPU if device.type == "cpu" else KERNELS
        self._began = dispatching(), torch.get_default_dtype(), [get() for get, _ in self._switches]
        self._named: dict[int, _Named] = {}
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._held: list[weakref.ref[Saved]] = []  # of the work at hand, see `stand_in`
        self._generators: TorchGenerators | None = None
        self._keep: Container[int] | None = None
        self._drops = False
        self.kept: dict[int, torch.Tensor] = {}  # by number
        self.sizes: dict[int, Size] = {}  # of all values, where none are kept
        self.unfit: str | None = None  # the last function of the work at hand that cannot be run again, and why
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._serial = 0
        self.work: Work | None = None

    # -- blocks ---------------------------------------------------------------------------------------------------

    def begin(
        self,
        values: Iterable[tuple[int, torch.Tensor]],
        count: int,
        keep: Container[int] | None = None,
        *,
        drops: bool = False,
    ) -> Work:
        """A block has returned. ``values``: tensors that stand for what it had and has made, by number, below
        ``count``. ``keep``: numbers of values to hold until the next block is called (None: none, the sizes of all are
        noted). ``drops``: saved tensors are let go of at once, which a recompute makes again (else see `stand_in`)."""
        self.work, self._keep, self._drops = Work(self._device, self._surroundings, count), keep, drops
        self._held.clear()
        self._named, self._next, self._generators = {}, count, None
        self.kept.clear()
        self.sizes.clear()
        self.unfit = None
        for number, tensor in values:
            self._name(tensor, number)
        return self.work

    def leave(self) -> None:
        """Nothing is traced until the next `begin`."""
        self.work = None
        self._held.clear()
        self._named.clear()
        self.kept.clear()

    def number(self, tensor: torch.Tensor) -> int | None:
        """Which value ``tensor`` is; None where it is none, or was written into since."""
        found = self._named.get(id(tensor))
        if found is None or found.tensor() is not tensor or found.version != tensor._version:
            return None
        return found.number

    def alive(self, number: int) -> torch.Tensor:
        """The tensor that a value is, where it is still there; else one without bytes."""
        found = next((one.tensor() for one in self._named.values() if one.number == number), None)
        return torch.empty(0, device="cpu") if found is None else found

    def source(self, tensor: torch.Tensor) -> Source:
        """What ``tensor`` is for a recompute."""
        number = self.number(tensor)
        return Constant.of(tensor) if number is None else Value(number, tensor.requires_grad)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether it is a leaf, or a block or functions of what is known have made it: nothing else of the chain."""
        found = self._seen.get(id(tensor))
        return tensor.is_leaf or (found is not None and found() is tensor)

    def stand_in(self) -> int:
        """Where nobody reads the numbers: let go of saved tensors that a recompute makes again. Returns their bytes."""
        alive = [one for reference in self._held if (one := reference()) is not None]
        nbytes = sum(storages([one.tensor for one in alive if one.tensor is not None]).values())
        for one in alive:
            shape, dtype, device = one.looks
            one.tensor = torch.zeros((), dtype=dtype, device=device).expand(shape)
            one.version = one.tensor._version
        self._held.clear()
        return nbytes

    # -- functions ------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the function, and trace it where it is given something that comes from the last block."""
        if torch.compiler.is_compiling() or self.asleep:
            return func(*args, **kwargs)
        if is_about_itself(func):
            if getattr(func, "__name__", "") in _REPLACE:  # other bytes by ``.data = ..``, of which no version tells
                self._forget(args[:1])
            return func(*args, **kwargs)
        given = tensors_in([args, kwargs])
        known = all(self.is_known(t) for t in given if t.requires_grad)
        if known and self.work is not None and any(self.number(t) is not None for t in given):
            writes = written(func, args, kwargs)
            if not writes and self._is_fit(given) and not any(map(_draws_apart, (*args, *kwargs.values()))):
                return self._traced(self.work, func, args, kwargs, given)
            self.unfit = f"{getattr(func, '__name__', func)} {_WRITES if writes else _ELSEWHERE}"
            self._forget(writes)
            known = False
        result = func(*args, **kwargs)
        if known:
            self.see(result)
        return result

    def _is_fit(self, given: Sequence[torch.Tensor]) -> bool:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if transformed or torch.is_inference_mode_enabled() or saving_entered():
            return False
        modes, dtype, switches = self._began
        same = dispatching() == modes and torch.get_default_dtype() == dtype
        return same and all(type(t) in _PLAIN for t in given) and [get() for get, _ in self._switches] == switches

    def _traced(self, work: Work, func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[torch.Tensor]) -> Any:
        sources = {id(t): self.source(t) for t in given}
        args_of, kwargs_of = mapped((args, kwargs), torch.Tensor, lambda t: sources[id(t)])
        versions = [t._version for t in given]
        operation = Operation(func, args_of, kwargs_of, torch.is_grad_enabled(), Autocast.capture(self._device))
        saved, before = list[Saved](), self._drawn_from()
        with saved_tensors_hooks(self._packing(saved), Saved.unpacked):
            result = func(*args, **kwargs)
        if before is not None and not before.still():
            operation.generators, self._generators = before, None
        if [t._version for t in given] == versions:
            self._add(work, operation, sources, saved)
            self._number_results(operation, result)
        return result

    def _drawn_from(self) -> TorchGenerators | None:
        """Generators as they are now; None where nothing runs again, and their bytes would be measured."""
        if self._keep is not None and (self._generators is None or not self._generators.still()):
            self._generators = TorchGenerators.capture(self._device)
        return self._generators

    def _packing(self, saved: list[Saved]) -> Callable[[torch.Tensor], Saved]:
        def pack(tensor: torch.Tensor) -> Saved:
            found = Saved(tensor.detach(), tensor._version, (tensor.shape, tensor.dtype, tensor.device))
            saved.append(found)
            return found

        return pack

    def _add(self, work: Work, operation: Operation, sources: dict[int, Source], saved: list[Saved]) -> None:
        """The operation can be run again: what it has saved beside constants is made again then."""
        constants = storages([one.held for one in sources.values() if isinstance(one, Constant)])
        dropped = set[int]()
        for place, one in enumerate(saved):
            if one.tensor is not None and constants.keys().isdisjoint(storages([one.tensor])):
                dropped.add(place)
                one.work, one.place, one.again = work, (len(work.operations), place), self._again
                if self._drops:
                    one.tensor, work.drops = None, True
                elif self._keep is None:
                    self._held.append(weakref.ref(one))
        operation.saves, operation.dropped = len(saved), frozenset(dropped if self._drops else ())
        work.operations.append(operation)

    def _number_results(self, operation: Operation, result: Any) -> None:
        tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        for place, tensor in enumerate(tensors):
            if self.number(tensor) is None:  # not what it was given, which some functions give back
                operation.made[place] = self._next
                self._name(tensor, self._next)
                self._next += 1

    # -- names ----------------------------------------------------------------------------------------------------

    def _name(self, tensor: torch.Tensor, number: int) -> None:
        self._named[id(tensor)] = _Named(weakref.ref(tensor), tensor._version, number)
        if self._keep is None:
            self.sizes[number] = self.size(tensor)
        elif number in self._keep:
            self.kept[number] = tensor
        self.see(tensor)

    def size(self, tensor: torch.Tensor) -> Size:
        """Where a storage that has gone lay, another may lie by now."""
        for address, nbytes in storages([tensor]).items():
            known = self._storages.get(address)
            if known is None or known[0].expired():  # type: ignore[no-untyped-call]
                self._serial += 1
                known = self._storages[address] = (
                    StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call]
                    self._serial,
                )
            return Size(known[1], address, nbytes)
        return Size(0, 0, 0)

    def _forget(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            self._named.pop(id(tensor), None)
            self._seen.pop(id(tensor), None)

    def see(self, result: Any) -> None:
        """Tensors of ``result`` are known: a block, or functions of what is known, have made them."""
        for tensor in tensors_in(result):
            if tensor.requires_grad:
                key = id(tensor)
                self._seen[key] = weakref.ref(tensor, partial(_forget, self._seen, key))


def _draws_apart(argument: Any) -> bool:
    return isinstance(argument, torch.Generator)


def _forget(seen: dict[int, weakref.ref[torch.Tensor]], key: int, gone: weakref.ref[torch.Tensor]) -> None:
    """A tensor has gone; another may have its ``key`` by now."""
    if seen.get(key) is gone:
        del seen[key]
