"""`Recorder`: takes note of every outermost torch call while a program runs, which is its first sweep.

The program runs under plain autograd and its graph stays: only what nodes save is replaced by a number (see `Tape`). So
its tensors look to Python, and to kernels that ask, as they always do, hooks and sums of gradients are plain autograd's
own, and errors are PyTorch's. Tensors live as long as the program itself, the tape or a restart checkpoint holds them.
"""

import contextlib
import functools
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tapestream.errors import GradientError
from tapestream.executor.program.ambients import Ambients
from tapestream.executor.program.exposed import EXPOSING, Exposed
from tapestream.executor.program.generators import Draws
from tapestream.executor.program.hidden import Hidden
from tapestream.executor.program.keeper import Keeper, foreign
from tapestream.executor.program.moves import Moves
from tapestream.executor.program.numbering import Numbering
from tapestream.executor.program.packs import Packs
from tapestream.executor.program.patterns import Call, Measured, tensors_of
from tapestream.executor.program.record import Record
from tapestream.executor.program.seams import FROM_DLPACK, heard_by
from tapestream.executor.program.tape import Handle, Tape
from tapestream.executor.program.trials import Spare, Trials, expected
from tapestream.executor.program.users import is_custom, kernel_of
from tapestream.executor.program.writes import QUESTIONS, SWITCHES, check_changed
from tapestream.runner.ambient import cuda_in_use
from tapestream.runner.modes import exchange, modes_entered
from tapestream.runner.passable import taking_over

Operation = Callable[[int, int], None]
_NONE = frozenset[int]()


def _always(nbytes: int, *, anyway: bool) -> bool:
    return True


class Recorder(TorchFunctionMode):
    """One sweep. ``between`` is called before each operation from ``quiet`` on, with its number and the bytes saved for
    backward so far: the time to make a restart checkpoint, and to say whether saved tensors are to be kept from here on
    (see `Packs`).

    ``next_nbytes``: what the next operation is to take, with what it makes and saves, as far as that can be known.
    ``spare``: see `Spare`. ``holding``: values that are to be kept with the restart checkpoint before an earlier
    operation, which is there, by their number. ``moves``: what goes below the device meanwhile.
    """

    only_watches = True
    spare: Spare = staticmethod(_always)

    def __init__(self, record: Record, keeper: Keeper, tape: Tape, between: Operation) -> None:
        super().__init__()
        self.record, self.keeper, self.tape, self.between = record, keeper, tape, between
        self.holding: Mapping[int, int] = {}
        self.moves: Moves | None = None
        self.quiet = self.next_nbytes = self._largest_nbytes = 0
        self.numbers = Numbering(record, keeper)
        self.packs = Packs(record, self.numbers, tape, keeper.hold)
        self._bypassed: set[int] = set()  # storages that .data shows
        self._exposed = Exposed(self.numbers.storage_of)
        self._epoch = 0
        self._inside = False
        self._hidden: Hidden | None = None
        self._trials = Trials(keeper.device)
        kinds = {"cpu": 0, keeper.device.type: 0, **({"cuda": 0} if cuda_in_use() else {})}
        self._ambients, self._draws = Ambients(record.ambients, tuple(kinds)), Draws(record)
        self._entered: list[Any] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the program runs."""
        here = [self]  # the graph holds both hooks as long as it lives: it must not hold all this

        def pack(tensor: torch.Tensor) -> Handle:
            recorder = here[0]
            # By an operation that no torch call showed: nothing could make it again.
            return recorder.packs.add(tensor) if recorder._inside else (tensor.detach(), tensor._version)

        try:
            with saved_tensors_hooks(pack, self.tape.unpack), heard_by(self), self:
                yield
        finally:
            here.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return func(*args, **kwargs)
        if self._inside:
            if self._hidden is not None:
                self._hidden.see(func, args, kwargs)
                if is_custom(func):
                    with self:  # in place of the call, which would be ours again
                        return kernel_of(func, args, kwargs)(*args, **kwargs)
            return func(*args, **kwargs)
        if func is torch.Tensor.__deepcopy__:
            return self._deep_copied(*args)
        if func in SWITCHES and ((number := self.numbers.of(args[0])) is None or number < 0):
            self.record.switched = True  # nothing that would have to run again: later calls are told which need one
            return func(*args, **kwargs)
        if func in EXPOSING:
            self._exposed.note(args[0])
        for kind in types:
            if not issubclass(kind, torch.Tensor):  # the user's own, which hands its tensors on in calls of its own
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        if is_custom(func):
            with self:
                return self.opaque(func, args, kwargs)
        result = self._call(func, args, kwargs)
        if (type(result) is not torch.Tensor or types) and (odd := taking_over(tensors_of(result, []))):
            self.record.spoilt = self.record.spoilt or (
                f"tensors of class {odd} take torch's calls into their own hands (__torch_function__, "
                "__torch_dispatch__), which replays would go past"
            )
        return result

    def _deep_copied(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """What a memo holds by ids is of this moment alone: a replay gets one of its own."""
        if id(tensor) not in memo:
            memo[id(tensor)] = self._call(_deep_copy, (tensor,), {})
        found: torch.Tensor = memo[id(tensor)]
        return found

    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """See `Listener`: a call of an autograd.Function, or of a custom operation."""
        kwargs = kwargs or {}
        if self._inside:
            return function(*args, **kwargs)
        self._hidden, k = Hidden(), len(self.record)
        try:
            with self.unheard():
                out = self._call(function, args, kwargs)
            self._inside = True
            if len(self.record) > k:
                if self._hidden.end(tensors_of((args, kwargs, out), [])):
                    self.record.spoilt = f"running statistics were written into by {function.__name__}"
                self.record.hidden[k] = self._hidden
            return out
        finally:
            self._hidden, self._inside = None, False

    def plain(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `Listener`."""
        if self._inside:
            return function(*args)
        with self.unheard():
            return self._call(function, args, {}, always=True)

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Inside, this mode is not entered. Where it is, as outside of torch's own calls of it, everything that the
        recorder asks a tensor for comes to it as a call of its own."""
        before, self._entered = self._entered, modes_entered()
        try:
            if self in self._entered:
                exchange([mode for mode in self._entered if mode is not self])
            yield
        finally:
            exchange(self._entered)
            self._entered = before  # in the end nothing, since this is one of them and would hold itself

    def _heard(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that this mode is to see the inside of."""
        modes = modes_entered()
        try:
            exchange(self._entered)
            return function(*args, **kwargs)
        finally:
            exchange(modes)

    def casts_cleared(self) -> None:
        """See `Listener`."""
        self._epoch += 1

    def compiled(self) -> None:
        """See `Listener`. Raises GradientError where this mode is entered: it would be compiled too."""
        if not self._inside or self._hidden is not None:
            raise GradientError(
                "Program: torch.compile, or a function or module compiled by it, is called inside, and what it "
                "computes would not be noted; compile modules before the program runs, which are one operation each "
                "then, name the module that calls it in opaque=[...], or call it uncompiled"
            )

    def scripted(self, name: str) -> None:
        """See `Listener`. Raises GradientError: its interpreter changes graphs from call to call, and their bits."""
        raise GradientError(
            f"Program: {name}, made by torch.jit.script or torch.jit.trace, is called inside, and torch.jit runs "
            "another graph of it the next time; call the function or module that it was made from"
        )

    def forget(self) -> None:
        """At the end: hold nothing of the program, of which a last call may have failed."""
        self.numbers.forget()
        self.packs.begin(len(self.record))

    # -- one call -------------------------------------------------------------------------------------------------

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any], *, always: bool = False) -> Any:
        self._inside = True
        try:
            return self._noted(func, args, kwargs, always)
        finally:
            self._inside = False

    def _noted(self, func: Any, args: Any, kwargs: dict[str, Any], always: bool) -> Any:
        record, k = self.record, len(self.record.calls)
        tensors: list[torch.Tensor] = []
        call = record.patterns.of(func, args, kwargs, tensors)
        pattern, measured = call.pattern, call.measured
        if k >= self.quiet:
            self._before(k, measured, tensors)
        ambient = self._ambients.now(self._epoch)
        numbers = self.numbers.given(tensors, k)
        if self._exposed.sums:
            record.spoilt = record.spoilt or self._exposed.why_spoilt(tensors)
        announced = self._announce([tensors[i] for i in call.into]) if call.into else _NONE
        versions = [t._version for t in tensors]
        self.numbers.made_nbytes = 0
        self.packs.begin(k)  # a call before it may have failed
        if self._hidden is not None:
            self._hidden.shown = call.shown
        drawing = self._draws.before(call)
        start = time.perf_counter()
        call_it = func if self._hidden is None else functools.partial(self._heard, func)
        if measured.transient_nbytes is None:
            result = self._trials.run(measured, functools.partial(call_it, *args, **kwargs))
        else:
            result = call_it(*args, **kwargs)
        seconds = time.perf_counter() - start
        # Running statistics are written into without a new version.
        touched = versions != [t._version for t in tensors] or call.needs != [t.requires_grad for t in tensors]
        changed = self._changed(tensors, versions, announced) if touched else announced
        made = [result] if type(result) is torch.Tensor else tensors_of(result, [])
        # A gradient is not made here: external where it is used.
        fresh = [] if call.attribute == "grad" else [t for t in made if self.numbers.of(t) is None]
        noted = bool(fresh or touched or changed or always)
        drawn = drawing is not None and self._draws.after(drawing, call)
        if not (drawn or noted):
            self.packs.begin(k)
            return result
        if touched:
            self._spoil(func, tensors, list(zip(versions, call.needs, strict=True)), announced)
        if changed or call.attribute == "data":
            self._heed_writes(k, call, tensors, changed)
        if drawn:
            record.drawn.append(k)
        number = None if pattern.foreign else call.number
        record.calls.append(record.patterns.number(call, fresh) if number is None else number)
        record.ambient.append(ambient)
        record.seconds.append(seconds)
        record.arguments.extend(numbers)
        record.argument_ends.append(len(record.arguments))
        self.numbers.used(numbers, k)
        one = len(made) == 1 == len(fresh)
        results = [self.numbers.new(made[0], k)] if one else [self.numbers.made(t, k) for t in made]
        if self.holding:
            self._hold(results, made)
        record.results.extend(results)
        record.result_ends.append(len(record.results))
        self._end(k, func, call, tensors, fresh)
        taken = self._trials.note(record, self.numbers, measured, tensors, call.needs, announced, fresh, self.spare)
        self._largest_nbytes = max(self._largest_nbytes, taken)
        return result

    def _before(self, k: int, measured: Measured, tensors: list[torch.Tensor]) -> None:
        self.next_nbytes = expected(measured, tensors, self._largest_nbytes)
        self.between(k, self.packs.nbytes)

    def _hold(self, results: list[int], made: list[torch.Tensor]) -> None:
        for number, tensor in zip(results, made, strict=True):
            operation = self.holding.get(number)
            if operation is not None:
                self.keeper.add(operation, number, tensor, self.record.storage[number])

    def _end(self, k: int, func: Any, call: Call, tensors: list[torch.Tensor], fresh: list[torch.Tensor]) -> None:
        """Others may write into arrays that an operation has saved, or has made a tensor over, or imported."""
        self.packs.end(k)
        if call.pattern.foreign and self._hidden is None:
            self.record.hidden[k] = Hidden(call.shown)
        if not call.buffers and func is not FROM_DLPACK:
            return
        if self.record.packs[k]:
            self.record.arrays.given(call.buffers)
        for tensor in tensors if func is FROM_DLPACK else ():
            self._exposed.note(tensor)
        for tensor in fresh:
            if foreign(tensor):
                self._exposed.note(tensor)
                self.record.arrays.shown(self.numbers.storage_of(tensor), tensor)

    def _announce(self, into: Sequence[torch.Tensor]) -> Set[int]:
        """The storages that a call says it will write into; what holds them gets copies."""
        of, storage_of = self.numbers.of, self.numbers.storage_of
        announced = {storage_of(t) for t in into if of(t) is not None}
        if self.moves is not None:
            self.moves.written(into)
        for storage in announced:
            self.keeper.before_write(storage, self.numbers.shown.get(storage, []))
        return announced

    def _spoil(
        self, func: Any, tensors: list[torch.Tensor], before: list[tuple[int, bool]], announced: Set[int]
    ) -> None:
        """What was written into without a word, or has a need of a gradient that it had not before."""
        of, external = self.numbers.storage_of, self.record.storage_external
        for storage in check_changed(func, tensors, before, of, external, announced):
            self.keeper.spoilt(storage)
            if self.moves is not None:
                self.moves.written([t for t in tensors if of(t) == storage])

    def _changed(self, tensors: list[torch.Tensor], versions: list[int], announced: Set[int]) -> Set[int]:
        changed = (t for t, version in zip(tensors, versions, strict=True) if t._version != version)
        return announced | {self.numbers.storage_of(t) for t in changed}

    def _heed_writes(self, k: int, call: Call, tensors: list[torch.Tensor], changed: Set[int]) -> None:
        for storage in changed:
            self.record.writes.setdefault(storage, array("i")).append(k)
        if self._exposed.sums:
            self._exposed.note_written(tensors, changed)
            self.record.arrays.written(changed)
        if changed & self._bypassed:
            raise GradientError(
                "Program: a tensor that requires a gradient was written into through its .data, which autograd does "
                "not see; write into it under torch.no_grad(), or into a clone()"
            )
        if call.attribute == "data" and tensors[0].requires_grad:
            self._bypassed.add(self.numbers.storage_of(tensors[0]))


def _deep_copy(tensor: torch.Tensor) -> Any:
    return tensor.__deepcopy__({})  # type: ignore[no-untyped-call]
