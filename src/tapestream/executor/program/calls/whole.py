"""Modules taken as one operation each: a program's record holds their call, and a replay calls them again.

What such a call reads besides its arguments must be there again: parameters and buffers go in as arguments, so that a
replay writes into copies of buffers; attributes must be what they were; all else is refused by name (see `Taken`).
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tapestream.errors import GradientError
from tapestream.executor.program.calls.foreign import shown
from tapestream.executor.program.calls.samples import Samples
from tapestream.executor.program.calls.values import written
from tapestream.runner.stage import is_compiled

_EVERY_MODULES = frozenset(vars(nn.Module()))
Slot = tuple[dict[str, torch.Tensor | None], str]
Watch = Callable[[], contextlib.AbstractContextManager[None]]


class Attributes:
    """What the modules below one are set to, besides parameters and buffers; tensors with their versions."""

    def __init__(self, module: nn.Module) -> None:
        self.held = [
            (owner, name, value)
            for owner in module.modules()
            for name, value in vars(owner).items()
            if name not in _EVERY_MODULES
        ]
        self.shown = [shown(value) for _, _, value in self.held]
        self.names = [(id(owner), name) for owner, name, _ in self.held]

    def difference(self, other: "Attributes") -> str | None:
        """The name of an attribute that is not the same."""
        if self.names == other.names and self.shown == other.shown:
            return None
        mine, theirs = (dict(zip(one.names, one.shown, strict=True)) for one in (self, other))
        for (owner, name), _ in (*mine.items(), *theirs.items()):
            if mine.get((owner, name)) != theirs.get((owner, name)):
                return name
        return "the order of attributes"


class State:
    """One module in one program call. ``watch``: around its call, while that is a part of the program's own run."""

    # Without weak references: a record holds it itself (see `Foreign`).
    __slots__ = (
        "attributes", "buffers", "captured", "compiled", "modules", "parameters", "training", "watch", "written"
    )  # fmt: skip

    def __init__(self, module: nn.Module) -> None:
        self.modules = modules = list(module.modules())
        self.training = [m.training for m in modules]
        self.parameters: list[Slot] = []
        self.buffers: list[Slot] = []
        self.written: list[bool] = []  # by buffer, whether a call may
        for m in modules:
            parameters: dict[str, Any] = m._parameters
            self.parameters += [(parameters, name) for name, p in parameters.items() if p is not None]
            own = [name for name, b in m._buffers.items() if b is not None]
            self.buffers += [(m._buffers, name) for name in own]
            self.written += [m.training and name not in m._non_persistent_buffers_set for name in own]
        self.attributes = Attributes(module)
        self.compiled = any(map(is_compiled, modules))
        self.watch: Watch | None = None
        self.captured: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    @contextlib.contextmanager
    def hooks(self, samples: Samples | None, *, first: bool) -> Iterator[None]:
        """Inside, what takes note of saved tensors is not compiled with the module; ``samples``: of a compiled one."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True) if samples is not None else None
        if top is None or samples is None:
            yield
            return
        pack, unpack = top
        samples.begin(first=first)

        def seen(tensor: torch.Tensor) -> Any:
            samples.see(tensor, first=first)
            return pack(tensor)

        with saved_tensors_hooks(torch.compiler.disable(seen), unpack):  # type: ignore[no-untyped-call]
            yield

    def check_captured(self, name: str) -> None:
        """Raise GradientError where a tensor that the module reads by itself has been written into."""
        tensor = written(self.captured.values())
        if tensor is not None:
            raise GradientError(
                f"Program: leaf module {name} reads a tensor of shape {tuple(tensor.shape)} that is neither its "
                "argument, parameter nor buffer and that was modified in place since; register it as a buffer"
            )


@dataclass(frozen=True, slots=True)
class Whole:
    """The call of a module as one function of all its tensors. ``plain``: the way its class is called."""

    module: nn.Module
    plain: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return type(self.module).__name__

    def __call__(
        self, state: State, args: Any, kwargs: Any, parameters: Any, buffers: Any, samples: Samples | None
    ) -> Any:
        """Call it with these parameters and buffers in place of those that it has."""
        if state.watch is not None:
            with state.watch(), state.hooks(samples, first=True):
                return self.plain(self.module, *args, **kwargs)
        name = Attributes(self.module).difference(state.attributes)
        if name is not None:
            raise GradientError(
                f"Program: leaf module {self.__name__} has to run again, but its attribute {name!r} has changed since; "
                "leave its class out of opaque"
            )
        state.check_captured(self.__name__)
        with _put_in(state, parameters, buffers), state.hooks(samples, first=False):
            return self.plain(self.module, *args, **kwargs)


@contextlib.contextmanager
def _put_in(state: State, parameters: Any, buffers: Any) -> Iterator[None]:
    """Inside, the module has these parameters and buffers, and the training flags of its first run."""
    slots = [*zip(state.parameters, parameters, strict=True), *zip(state.buffers, buffers, strict=True)]
    before = [(slot, slot[0][slot[1]]) for slot, _ in slots]
    training = [m.training for m in state.modules]
    try:
        for (place, name), tensor in slots:
            place[name] = tensor
        for m, flag in zip(state.modules, state.training, strict=True):
            m.training = flag
        yield
    finally:
        for (place, name), tensor in before:
            place[name] = tensor
        for m, flag in zip(state.modules, training, strict=True):
            m.training = flag


def announced(args: Sequence[Any]) -> list[torch.Tensor]:
    """The buffers that a call of `Whole` may write into: those in training mode that are saved with the model."""
    state, buffers = args[0], args[4]
    return [b for b, written in zip(buffers, state.written, strict=True) if written]
