"""`Recorder`: takes note of every outermost torch call while a program runs, which is its first sweep.

The program runs under plain autograd and its graph stays: only what nodes save is replaced by a number (see `Tape`). So
its tensors look to Python, and to kernels that ask, as they always do, hooks and sums of gradients are plain autograd's
own, and errors are PyTorch's. Tensors live as long as the program itself, the tape or a restart checkpoint holds them.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

import tapestream.executor.program.calls.transforms  # noqa: F401 - which has these heard
from tapestream.errors import GradientError
from tapestream.executor.program.calls.exposed import EXPOSING
from tapestream.executor.program.calls.hidden import Hidden
from tapestream.executor.program.calls.patterns import is_lasting, tensors_of
from tapestream.executor.program.calls.rerun import Rerun
from tapestream.executor.program.calls.seams import Apply, heard_by
from tapestream.executor.program.calls.users import is_custom, kernel_of
from tapestream.executor.program.calls.values import address_of, shows
from tapestream.executor.program.calls.writes import QUESTIONS, SETS_DATA, SWITCHES, gives_back
from tapestream.executor.program.noting.along import Along
from tapestream.executor.program.noting.contexts import Contexts, versions_of
from tapestream.executor.program.noting.following import UNKNOWN
from tapestream.executor.program.noting.inner import GRAD, inner_of
from tapestream.executor.program.noting.noting import Noting, Operation
from tapestream.executor.program.record.keeper import Keeper
from tapestream.executor.program.record.record import Record
from tapestream.executor.program.record.tape import Handle, Tape
from tapestream.runner.modes import exchange, modes_entered, put_on, save_below, take_off
from tapestream.runner.passable import taking_over

_HEARS = "__torch_function__"


class Recorder(Noting, TorchFunctionMode):
    """One sweep: hears of every outermost call, and of those that no function mode sees (see `Listener`)."""

    only_watches = True

    def __init__(
        self, record: Record, keeper: Keeper, tape: Tape, between: Operation, along: Along | None = None
    ) -> None:
        super().__init__(record, keeper, tape, between, along)
        self._inside = False
        self._entered: list[Any] = []
        self.contexts = Contexts(set())

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the program runs."""
        here = [self]  # the graph holds both hooks as long as it lives: it must not hold all this

        def pack(tensor: torch.Tensor) -> Handle:
            packs = here[0].packs
            listed = packs.listed
            if listed is not None:
                listed.append(tensor)
                return packs.first + len(listed) - 1
            return packs.add(tensor) if here[0]._inside else here[0]._kept(tensor)

        self._hooks, self._saving = saved_tensors_hooks(pack, self.tape.unpack), False
        try:
            if self.along is None:
                self._save()
            else:
                hear = self.along.hearing(self.__torch_function__)
                vars(self)[_HEARS] = types.MethodType(hear, self)
            with heard_by(self), self:
                yield
        finally:
            vars(self).pop(_HEARS, None)  # which holds this
            if self._saving:
                self._hooks.__exit__()
            here.clear()

    def _kept(self, tensor: torch.Tensor) -> Handle:
        """What is saved by an operation that is not noted: nothing could make it again."""
        storage = self.numbers.storage_at(address_of(tensor))
        if storage is None or not self.record.storage_external[storage]:
            self.contexts.hold(tensor)
        return tensor.detach(), tensor._version

    def _save(self) -> None:
        """Take what is saved from here on."""
        save_below(self._hooks)
        self._saving = True

    def depart(self) -> None:
        """Note all from here on."""
        along = self.along
        assert along is not None
        vars(self).pop(_HEARS, None)
        self._save()  # which torch.func's transforms forbid
        self.departed, self.along, self.record.departed = along, None, True
        with self.unheard():
            self._begin()
        along.otherwise(along.held_nbytes)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.along is not None and forward_ad._current_level < 0:
            result = self.along.call(func, args, kwargs)
            if result is not UNKNOWN:
                return result
            self.depart()
        if forward_ad._current_level >= 0 and not self._inside:
            return self._with_tangents(func, args, kwargs or {})
        if self.following is not None and not self._inside:
            self._inside = True
            try:
                result = self.following.call(func, args, kwargs)
            finally:
                self._inside = False
            if result is not UNKNOWN:
                return result
        kwargs = kwargs or {}
        if func in QUESTIONS or gives_back(func, args, kwargs) or (types and func != SETS_DATA and _nothing_in(args)):
            return func(*args, **kwargs)
        if self._inside:
            if self._hidden is not None:
                self._hidden.see(func, args, kwargs)
                if is_custom(func):
                    with self:  # in place of the call, which would be ours again
                        return kernel_of(func, args, kwargs)(*args, **kwargs)
            return func(*args, **kwargs)
        if is_lasting(func) and getattr(func, "__name__", "") != "__set__":
            self.flush()
        else:  # no versions tell what it does to others
            self.look_again()
        if func is torch.Tensor.__deepcopy__:
            return self._deep_copied(*args)
        if func in SWITCHES and ((number := self.numbers.of(args[0])) is None or number < 0):
            self.stop_following()
            self.record.switched = True  # nothing that would have to run again: later calls are told which need one
            return func(*args, **kwargs)
        if func == SETS_DATA and self._may_have_other_memory(*args):
            return self._hand_over(*args)
        if func in EXPOSING:
            self.stop_following()
            self._exposed.note(args[0])
        for kind in types:
            if not issubclass(kind, torch.Tensor):  # the user's own, which hands its tensors on in calls of its own
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        if is_custom(func):
            with self:
                return self.opaque(func, args, kwargs)
        if func is GRAD:
            return self._gradient(args, kwargs)
        result = self._call(func, args, kwargs)
        if type(result) is not torch.Tensor or types:
            self._look_for_classes(result)
        return result

    def _look_for_classes(self, result: Any) -> None:
        """Of tensors that intercept calls."""
        if odd := taking_over(tensors_of(result, [])):
            self.record.spoilt = self.record.spoilt or (
                f"tensors of class {odd} intercept torch's calls (__torch_function__, __torch_dispatch__), which "
                "replays would bypass"
            )

    def _deep_copied(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """What a memo holds by ids is of this moment alone: a replay gets one of its own."""
        if id(tensor) not in memo:
            memo[id(tensor)] = self._call(_deep_copy, (tensor,), {})
        found: torch.Tensor = memo[id(tensor)]
        return found

    def _may_have_other_memory(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether nothing that backward needs is in the memory that a tensor of others has now."""
        with self.unheard():
            number = self.numbers.of(tensor)
            return number is None or (number < 0 and not self.record.saves_given(number))

    def _hand_over(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """A tensor of others gets the memory of another: it is what it is when it is used next."""
        self.stop_following()
        with self.unheard():
            before = None if is_lazy(tensor) else shows(tensor)
            SETS_DATA(tensor, value)
            if before is not None and before == shows(tensor):
                return  # as after ``tensor.data += 1``
            self.numbers.retire(tensor)
            self.numbers.give_to_others(value)
            if any(hidden.uses(tensor) for hidden in self.record.hidden.values()):
                self.record.spoilt = (
                    f"a tensor of shape {tuple(tensor.shape)} that an autograd.Function used without being given it "
                    "got other memory (.data = ...)"
                )

    def _with_tangents(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call while forward-mode differentiation computes tangents, which no replay would have: it is not noted, and
        what it saves is kept. What it makes is external to the operations that use it."""
        if self.along is not None:
            self.depart()
        with self.unheard():
            self.look_again()
            self.stop_following()
            try:
                return function(*args, **kwargs)
            finally:
                self.numbers.unnoted()

    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """See `Listener`: a call of an autograd.Function, of a custom operation, or a transform of torch.func."""
        kwargs = kwargs or {}
        if self._is_inside():
            return function(*args, **kwargs)
        if forward_ad._current_level >= 0:
            return self._with_tangents(function, args, kwargs)
        if self.along is not None:
            result = self._along(function, args) if type(function) is Apply and not kwargs else UNKNOWN
            if result is not UNKNOWN:
                return result
            self.depart()
        with self.unheard():
            self.look_again()
        self._hidden, k, contexts = Hidden(), len(self.record), self.contexts
        function, versions = contexts.function(function, self._hidden), versions_of(args)
        self.tape.running = k, []
        try:
            with self.unheard():
                out = self._call(function, args, kwargs)
            self._inside = True
            if len(self.record) > k:
                if self._hidden.end(tensors_of((args, kwargs, out), [])):
                    self.record.spoilt = f"{function.__name__} wrote into running statistics"
                self.record.hidden[k] = self._hidden
                self.packs.nbytes += contexts.look(function, args, versions, out, self._hidden)
                if isinstance(function, Rerun):
                    self.record.reverse_nbytes[k] += function.nbytes
            return out
        finally:
            self._hidden, self._inside, self.tape.running = None, False, None

    def _is_inside(self) -> bool:
        """Whether an operation runs. One that is not noted tells nobody, but the mode is left where it runs."""
        return self._inside or (self.along is not None and self not in modes_entered())

    def _along(self, function: Apply, args: tuple[Any, ...]) -> Any:
        """See `Along.call`."""
        assert self.along is not None
        mode = take_off()
        if mode is self:
            try:
                return self.along.call(function, args, None)
            finally:
                put_on(mode)
        put_on(mode)  # the user's own
        with self.unheard():
            return self.along.call(function, args, None)

    def _gradient(self, args: Any, kwargs: Any) -> Any:
        """``torch.autograd.grad`` inside the program."""
        with self.unheard():
            self.look_again()
            inner, tensors = inner_of(self.record, self.numbers, args, kwargs)
            return self._call(inner, tuple(tensors), {}, always=True)

    def plain(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `Listener`."""
        if self._is_inside():
            return function(*args)
        if forward_ad._current_level >= 0:
            return self._with_tangents(function, args, {})
        if self.along is not None:
            self.depart()
        with self.unheard():
            self.look_again()
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
        self.epoch += 1

    def compiled(self) -> None:
        """See `Listener`. Raises GradientError where this mode is entered: it would be compiled too."""
        if not self._is_inside() or self._hidden is not None:
            raise GradientError(
                "Program: torch.compile, or a function or module compiled by it, is called inside, and its operations "
                "cannot be traced; compile modules before the program runs (each is one operation then), name the "
                "module that calls it in opaque=[...], or call it uncompiled"
            )

    def scripted(self, name: str) -> None:
        """See `Listener`. Raises GradientError: its interpreter changes graphs from call to call, and their bits."""
        raise GradientError(
            f"Program: {name}, made by torch.jit.script or torch.jit.trace, is called inside, and torch.jit runs "
            "another graph in a replay; call the function or module that it was made from"
        )

    def forget(self) -> None:
        """At the end: hold nothing of the program, of which a last call may have failed."""
        self.numbers.forget()
        self.packs.begin(len(self.record))

    # -- one call -------------------------------------------------------------------------------------------------

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any], *, always: bool = False) -> Any:
        self._inside = True
        try:
            self.flush()
            return self._noted(func, args, kwargs, always)
        finally:
            self._inside = False


def _nothing_in(args: Any) -> bool:
    """Whether a parameter of a lazy module is given that was never called."""
    return any(map(is_lazy, args))


def _deep_copy(tensor: torch.Tensor) -> Any:
    return tensor.__deepcopy__({})  # type: ignore[no-untyped-call]
