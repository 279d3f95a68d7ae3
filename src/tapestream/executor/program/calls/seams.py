"""Calls that `TorchFunctionMode` does not see, and that must be: they are looked up anew at every call, so replacing
them where they are looked up reaches every user of them. They are replaced only while some program runs."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils.dlpack
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import _get_current_function_mode_stack as modes_entered

from tapestream.accelerator.device import seeding_functions
from tapestream.runner.checkpointing import checkpointing_off, heard_through_transforms
from tapestream.runner.nesting import covering

_DISABLED = torch._C._disabled_torch_function_impl
FROM_DLPACK = torch.utils.dlpack.from_dlpack
_FROM_BUFFER = torch.frombuffer
_PARAMETER = torch.nn.Parameter.__new__
_DYNAMO = "torch._dynamo.eval_frame"
_CALLING_BACK = "_callback_from_stance"  # asked at every call of what torch.compile gave


class Listener(Protocol):
    """Who hears of such calls made in its own thread."""

    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """Make the call ``function(*args, **kwargs)`` and take note of it as one operation."""

    def plain(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The same for any other function: one that sets a random generator, say."""

    def casts_cleared(self) -> None:
        """The cache of casts was cleared."""

    def compiled(self) -> None:
        """What ``torch.compile`` gave is about to run."""

    def scripted(self, name: str) -> None:
        """What ``torch.jit`` gave is about to run."""


class Deaf:
    """Hears of calls and does nothing: for replays, in which a program or a checkpoint inside is as plain as it was."""

    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """Make the call."""
        return function(*args, **(kwargs or {}))

    plain = opaque

    def casts_cleared(self) -> None:
        """Nothing follows."""

    compiled = casts_cleared

    def scripted(self, name: str) -> None:
        """Nothing follows."""


class _Heard(threading.local):
    listener: Listener | None = None


@dataclass(frozen=True, slots=True)
class Apply:
    """``cls.apply`` without the wrapper."""

    cls: Any

    @property
    def __name__(self) -> str:
        """That of the Function."""
        return str(self.cls.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Function."""
        return _function_base(self.cls)(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Transform:
    """One of `torch.func`'s transforms as one operation: what is saved inside for the graph around it is heard of."""

    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        """As users know it."""
        return "torch.func." + self.function.__name__.removesuffix("_impl").removesuffix("_with_argnums").strip("_")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        with heard_through_transforms():
            return self.function(*args, **kwargs)


REPLACED: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = []
"""More that is replaced, by those who know how: the place, the name there, and what makes the new from the old."""


class _Seams:
    def __init__(self) -> None:
        self.heard = _Heard()
        self._lock, self._users = threading.Lock(), 0
        self._places: list[tuple[Any, str, Any, Any]] = []  # with what is there before and while a program runs
        self._made_of: Any = None

    @contextlib.contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """Inside, ``listener`` hears of this thread's calls."""
        with self._lock:
            if not self._users:
                try:
                    self._put_in()
                except BaseException:  # half of it, and later programs would not be heard
                    self._take_out()
                    raise
            self._users += 1
        before, self.heard.listener = self.heard.listener, listener
        try:
            # Hooks of checkpoints would hide what is saved, and dropping that is what a program does.
            with covering(), checkpointing_off(transforms=False):
                yield
        finally:
            self.heard.listener = before
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._take_out()

    def _put_in(self) -> None:
        known = sys.modules.get(_DYNAMO), len(REPLACED), seeding_functions()
        as_before = [vars(place).get(name) is old for place, name, old, _ in self._places]
        if known != self._made_of or not all(as_before):
            self._made_of, self._places = None, []
            self._make()
            self._made_of = known
        for place, name, _, new in self._places:
            setattr(place, name, new)

    def _make(self) -> None:
        """What is to be put in, for as long as what it is made of lies there."""
        heard = self.heard

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            listener = heard.listener
            if listener is None or kwargs:
                return _function_base(cls)(*args, **kwargs)
            return listener.opaque(Apply(cls), args)

        def clear() -> None:
            cleared()
            if heard.listener is not None:
                heard.listener.casts_cleared()

        def seed(number: Any) -> Any:
            return seeded(number) if heard.listener is None else heard.listener.plain(seeded, (number,))

        def restore(new_state: torch.Tensor) -> None:
            if heard.listener is None:
                restored(new_state)
            else:
                heard.listener.plain(restored, (new_state,))

        def calling(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if heard.listener is None or kwargs:
                    return function(*args, **kwargs)
                return heard.listener.plain(function, args)

            return call

        def overridden(given: Any) -> bool:
            # Modules leave their fast paths where it says so; a mode that only watches is to change nothing.
            modes: list[Any] = modes_entered() if heard.listener is not None else [None]  # type: ignore[no-untyped-call]
            alone = all(getattr(mode, "only_watches", False) for mode in modes)
            return any(map(_overrides, given)) if alone else bool(overriding(given))

        cleared, seeded, restored = torch.clear_autocast_cache, torch.random.manual_seed, torch.random.set_rng_state
        overriding = torch.overrides.has_torch_function
        self._replace(torch.overrides, "has_torch_function", overridden)
        self._hear_compiled()
        self._hear_scripted()
        self._hear_memory(calling)
        self._replace(_SingleLevelFunction, "apply", classmethod(apply))
        self._replace(torch, "clear_autocast_cache", clear)
        for place in (torch, torch.random):
            self._replace(place, "manual_seed", seed)
            self._replace(place, "set_rng_state", restore)
        for place, name in seeding_functions():
            self._replace(place, name, calling(getattr(place, name)))
        for place, name, make in REPLACED:
            self._replace(place, name, make(getattr(place, name)))

    def _hear_compiled(self) -> None:
        """What torch.compile gave; where nothing was compiled yet, torch.compile itself."""
        heard, compiled = self.heard, torch.compile
        dynamo = sys.modules.get(_DYNAMO)
        called_back: Any = None if dynamo is None else vars(dynamo).get(_CALLING_BACK)

        def calling_back(callback: Any) -> Any:
            if heard.listener is not None and callback:
                heard.listener.compiled()
            return called_back(callback)

        def compiling(*args: Any, **kwargs: Any) -> Any:
            if heard.listener is not None:
                heard.listener.compiled()
            return compiled(*args, **kwargs)

        if called_back is not None:
            self._replace(dynamo, _CALLING_BACK, calling_back)
        elif dynamo is None:
            self._replace(torch, "compile", compiling)

    def _hear_memory(self, calling: Callable[[Any], Callable[..., Any]]) -> None:
        """What gives a tensor memory that is there already."""
        heard = self.heard

        def from_buffer(
            buffer: Any, *, dtype: torch.dtype, count: int = -1, offset: int = 0, requires_grad: bool = False
        ) -> Any:
            given = (buffer, dtype, count, offset, requires_grad)
            return _buffered(*given) if heard.listener is None else heard.listener.plain(_buffered, given)

        def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            if heard.listener is None or cls is not torch.nn.Parameter or type(data) not in (torch.Tensor, cls):
                return _PARAMETER(cls, data, requires_grad)
            return heard.listener.plain(made_parameter, (data, requires_grad))

        self._replace(torch.nn.Parameter, "__new__", staticmethod(parameter))
        self._replace(torch, "from_numpy", calling(torch.from_numpy))
        self._replace(torch, "from_dlpack", calling(FROM_DLPACK))
        self._replace(torch.utils.dlpack, "from_dlpack", calling(FROM_DLPACK))
        self._replace(torch, "frombuffer", from_buffer)
        self._replace(torch.Tensor, "set_", calling(torch.Tensor.set_))

    def _hear_scripted(self) -> None:
        """What torch.jit gave: functions and methods that its own interpreter runs."""
        heard = self.heard

        def hearing(kind: Any) -> Callable[..., Any]:
            run = kind.__call__

            def call(scripted: Any, *args: Any, **kwargs: Any) -> Any:
                if heard.listener is not None:
                    heard.listener.scripted(scripted.name)
                return run(scripted, *args, **kwargs)

            return call

        for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            self._replace(kind, "__call__", hearing(kind))

    def _replace(self, place: Any, name: str, new: Any) -> None:
        self._places.append((place, name, vars(place).get(name), new))

    def _take_out(self) -> None:
        for place, name, old, _ in reversed(self._places):
            if old is not None:
                setattr(place, name, old)
            elif name in vars(place):
                delattr(place, name)


def _overrides(given: Any) -> bool:
    """Whether an argument's class takes torch's calls into its own hands, as PyTorch asks."""
    kind = type(given)
    plain = kind is torch.Tensor or kind is torch.nn.Parameter
    return not plain and getattr(kind, "__torch_function__", _DISABLED) is not _DISABLED


def made_parameter(data: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """``nn.Parameter(data, requires_grad)``, which is one operation inside a program."""
    made: torch.Tensor = _PARAMETER(torch.nn.Parameter, data, requires_grad)
    return made


def _buffered(buffer: Any, dtype: torch.dtype, count: int, offset: int, requires_grad: bool) -> torch.Tensor:
    return _FROM_BUFFER(buffer, dtype=dtype, count=count, offset=offset, requires_grad=requires_grad)


def _function_base(cls: Any) -> Callable[..., Any]:
    return super(_SingleLevelFunction, cls).apply  # type: ignore[no-any-return]


_SEAMS = _Seams()


def heard_by(listener: Listener) -> contextlib.AbstractContextManager[None]:
    """Inside, ``listener`` hears of calls that this thread makes."""
    return _SEAMS.heard_by(listener)


def listener_now() -> Listener | None:
    """Who hears of this thread's calls."""
    return _SEAMS.heard.listener
