"""`Taken`: which modules a program takes as one operation each, and what of them is refused because a replay could not
reproduce it."""

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from tapestream.capture.python_state import GENERATORS
from tapestream.errors import GradientError, InputError
from tapestream.executor.program.calls.foreign import PLAIN
from tapestream.executor.program.calls.patterns import tensors_of
from tapestream.executor.program.calls.samples import Samples
from tapestream.executor.program.calls.seams import listener_now
from tapestream.executor.program.calls.whole import Attributes, Slot, State, Whole
from tapestream.executor.program.noting.recorder import Recorder
from tapestream.runner.ambient import HostGenerators
from tapestream.runner.depth import SHALLOW, deeper
from tapestream.runner.graph import next_sequence_number


def compiling_here() -> bool:
    """Whether torch.compile is at work in this thread: `torch.compiler.is_compiling` says so for all threads."""
    if torch.compiler.is_dynamo_compiling():  # true where Dynamo looks at this very line
        return True
    return torch.compiler.is_compiling() and torch._guards.CompileContext.try_get() is not None


class _Witness(TorchFunctionMode):
    """Watches a module's call in the first sweep, and refuses what a replay could not reproduce."""

    only_watches = True

    def __init__(
        self, recorder: Recorder, name: str, state: State, given: list[torch.Tensor], own: Iterable[torch.Tensor]
    ) -> None:
        super().__init__()
        self.recorder, self.name, self.state, self.given = recorder, name, state, given
        self._known = {id(t) for t in (*given, *own)}
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the call. Raises GradientError for writes into arguments and parameters."""
        versions = [t._version for t in self.given]
        if self.state.compiled:  # a mode would be compiled too
            yield
        else:
            with self:
                yield
        for tensor, version in zip(self.given, versions, strict=True):
            if tensor._version != version:
                raise _refused(
                    self.name, f"writes into an argument of shape {tuple(tensor.shape)}", "clone() it before the call"
                )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if compiling_here():
            return func(*args, **kwargs)
        for tensor in tensors_of((args, kwargs), []):
            if id(tensor) not in self._known:
                self._captured(tensor)
        result = func(*args, **kwargs)
        for tensor in tensors_of(result, []):
            self._made[id(tensor)] = weakref.ref(tensor)
        return result

    def _captured(self, tensor: torch.Tensor) -> None:
        made = self._made.get(id(tensor))
        if made is not None and made() is tensor:
            return
        number = self.recorder.numbers.of(tensor)
        if number is not None and number >= 0:
            raise captured(self.name, tensor)
        if id(tensor) not in self.state.captured:
            self.state.captured[id(tensor)] = weakref.ref(tensor), tensor._version


def captured(name: str, tensor: torch.Tensor) -> GradientError:
    """A module has used a tensor of the program that it was not given."""
    return _refused(
        name,
        f"uses a tensor of shape {tuple(tensor.shape)} of the program that was not passed to it",
        "pass it as argument",
    )


def _refused(name: str, what: str, instead: str) -> GradientError:
    return GradientError(
        f"Program: leaf module {name} {what}, so it cannot be run again; {instead}, or leave its class out of opaque"
    )


class Taken:
    """Modules of ``classes``, and the modules ``ones``, are one operation each in this call of a program; the modules
    ``maybe`` are so where they are given nothing but what a replay can give them again."""

    def __init__(self, classes: tuple[type, ...], ones: frozenset[int], maybe: frozenset[int]) -> None:
        self.classes, self.ones, self.maybe = classes, ones, maybe
        self._states: dict[int, State] = {}
        self._busy = False

    def takes(self, module: nn.Module, given: Sequence[Any]) -> bool:
        """Whether it is one of them, or a compiled one, and is not called by another of them."""
        if self._busy:
            return False
        if isinstance(module, self.classes) or id(module) in self.ones or "_orig_mod" in module._modules:
            return True
        if id(module) not in self.maybe or any(isinstance(value, (list, dict)) for value in given):
            return False  # what it puts into them would have been made inside
        return _odd(given) is None

    def call(self, recorder: Recorder, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call as one operation. Raises InputError and GradientError for what a replay could not reproduce."""
        state, new, name = self._states.get(id(module)), State(module), type(module).__name__
        odd = _odd((*args, *kwargs.values()))
        if odd is not None:
            raise InputError(
                f"Program: leaf module {name} is given an object of type {type(odd).__name__}, whose content may "
                "differ in a replay; pass tensors, numbers, strings, and tuples, lists and dictionaries of these, or "
                "leave its class out of opaque"
            )
        if state is None or state.training != new.training:
            state = self._states[id(module)] = new
        elif (changed := new.attributes.difference(state.attributes)) is not None:
            raise _refused(name, f"is called twice with its attribute {changed!r} changed in between", "pass it")
        state.check_captured(name)
        given = tensors_of((list(args), kwargs), [])
        parameters, buffers = _in(new.parameters), _in(new.buffers)
        state.watch = _Witness(recorder, name, state, given, (*parameters, *buffers)).watching
        host = HostGenerators.capture(_generators(state)) if state is new else None
        since, reached = next_sequence_number(), {t.grad_fn for t in given}
        self._busy = True
        try:
            samples = Samples(name) if state.compiled else None
            result = recorder.plain(Whole(module, plain), (state, args, kwargs, parameters, buffers, samples))
        finally:
            state.watch, self._busy = None, False
        state.captured = {key: found for key, found in state.captured.items() if found[0]() is not None}
        if host is not None and not host.equals(HostGenerators.capture(_generators(state))):
            raise _refused(name, "draws from Python's or NumPy's generators, or from its own", "draw from torch's")
        if (changed := Attributes(module).difference(state.attributes)) is not None:
            raise _refused(name, f"sets its attribute {changed!r} while it runs", "return it")
        if sum(b is not None for m in state.modules for b in m._buffers.values()) != len(buffers):
            raise _refused(name, "registers a buffer while it runs", "register it before")
        if any(place.get(key) is not b for (place, key), b in zip(new.buffers, buffers, strict=True)):
            raise _refused(name, "replaces a buffer", "copy_() into the buffer")
        _check_graph(name, result, since, reached)
        return result


def _in(slots: Iterable[Slot]) -> list[torch.Tensor]:
    return [tensor for place, key in slots if (tensor := place[key]) is not None]


def _odd(values: Iterable[Any]) -> object | None:
    """The first of ``values``, and of what is in containers among them, that may be another when it is used again."""
    for value in values:
        if isinstance(value, (tuple, list)):
            found = _odd(value)
        elif type(value) is dict:
            found = _odd(value.values())
        else:
            found = None if isinstance(value, (torch.Tensor, slice, *PLAIN)) else value
        if found is not None:
            return found
    return None


def _check_graph(name: str, result: Any, since: int, reached: set[Node | None]) -> None:
    """Raise GradientError where the result's graph leaves the call elsewhere than by its arguments and parameters."""
    waiting = [t.grad_fn for t in tensors_of(result, []) if t.grad_fn is not None]
    seen = {*waiting, *reached}  # held, since a node that Python lets go of is another object the next time
    waiting, most = [node for node in waiting if node not in reached], SHALLOW
    while waiting:
        if len(seen) > most + len(reached):
            most = deeper(most)
        node = waiting.pop()
        if node._sequence_nr() < since:  # those of leaves come last
            raise _refused(name, f"uses a result of {node.name()} of the program that was not passed to it", "pass it")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _generators(state: State) -> list[object]:
    return [value for _, _, value in state.attributes.held if isinstance(value, GENERATORS)]


class TakingWhole:
    """``function`` with modules taken as one operation each while a program runs it: those in ``opaque``, modules or
    classes of modules, and compiled ones; the modules ``maybe`` where what they are given allows it. Raises InputError
    for anything else in ``opaque``."""

    def __init__(
        self,
        function: Callable[..., Any],
        opaque: Iterable[type[nn.Module] | nn.Module],
        maybe: Sequence[nn.Module] = (),
    ) -> None:
        self._function, self._modules, classes = function, list[nn.Module](), list[type[nn.Module]]()
        for one in opaque:
            if isinstance(one, type) and issubclass(one, nn.Module):
                classes.append(one)
            elif isinstance(one, nn.Module):
                self._modules.append(one)
            else:
                raise InputError(f"Program: opaque holds modules and classes of modules, not {one!r}")
        self._classes, self._maybe = tuple(classes), tuple(maybe)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        looked_at = {*self._classes, *map(type, self._modules), *map(type, self._maybe)}
        compiled = sys.modules.get("torch._dynamo.eval_frame")
        if compiled is not None:
            looked_at.add(compiled.OptimizedModule)
        if not looked_at:
            return self._function(*args, **kwargs)
        taken = Taken(self._classes, frozenset(map(id, self._modules)), frozenset(map(id, self._maybe)))
        with _CALLS.seen_by(taken, looked_at):
            return self._function(*args, **kwargs)


class _Here(threading.local):
    taken: Taken | None = None


class _Calls:
    """Looks at calls of classes of modules, while some program runs that takes any of them as one operation."""

    def __init__(self) -> None:
        self._here, self._lock = _Here(), threading.Lock()
        self._users: dict[type, list[Any]] = {}  # how many programs, and the class's own __call__ before

    @contextlib.contextmanager
    def seen_by(self, taken: Taken, classes: Iterable[type[nn.Module]]) -> Iterator[None]:
        """Inside, calls that this thread makes of modules of ``classes`` may be taken."""
        before, self._here.taken = self._here.taken, taken
        classes = list(classes)
        with self._lock:
            for cls in classes:
                self._put_in(cls)
        try:
            yield
        finally:
            self._here.taken = before
            with self._lock:
                for cls in classes:
                    self._take_out(cls)

    def _put_in(self, cls: type[nn.Module]) -> None:
        users = self._users.setdefault(cls, [0, vars(cls).get("__call__")])
        users[0] += 1
        if users[0] > 1:
            return
        here, plain = self._here, cls.__call__

        @functools.wraps(plain)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if compiling_here():
                return plain(module, *args, **kwargs)
            taken, recorder = here.taken, listener_now()
            given = (*args, *kwargs.values())
            if taken is None or not isinstance(recorder, Recorder) or not taken.takes(module, given):
                return plain(module, *args, **kwargs)
            with recorder.unheard():
                return taken.call(recorder, module, plain, args, kwargs)

        cls.__call__ = call  # type: ignore[method-assign]

    def _take_out(self, cls: type[nn.Module]) -> None:
        users = self._users[cls]
        users[0] -= 1
        if not users[0]:
            if users[1] is None:
                del cls.__call__
            else:
                cls.__call__ = users[1]  # type: ignore[method-assign]
            del self._users[cls]


_CALLS = _Calls()
