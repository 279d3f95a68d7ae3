"""What surrounds a run besides its inputs: random generators, autocast, and the flag that says "this is a
recompute"."""

import contextlib
import ctypes
import random
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
import torch

from tapestream.accelerator.device import devices, in_use, is_accelerator, rng_state, set_rng_state

_RECOMPUTING: ContextVar[bool] = ContextVar("tapestream_recomputing", default=False)


def recomputing() -> bool:
    """True inside a stage that runs again to rebuild its saved tensors.

    Code that counts, logs or collects in a stage asks this, so that it does so once.
    """
    return _RECOMPUTING.get()


@contextlib.contextmanager
def as_recompute() -> Iterator[None]:
    """Make `recomputing` true inside."""
    token = _RECOMPUTING.set(True)
    try:
        yield
    finally:
        _RECOMPUTING.reset(token)


@dataclass(frozen=True, slots=True)
class TorchGenerators:
    """States of torch's default generators, the CPU's and those of accelerators; ``own``: of others, which a
    computation was given."""

    cpu: torch.Tensor
    others: tuple[tuple[torch.device, torch.Tensor], ...]
    own: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    @classmethod
    def capture(cls, device: torch.device | None = None, own: Iterable[torch.Generator] = ()) -> "TorchGenerators":
        """The states as they are now. ``device``: whose beside the CPU's; None: every accelerator's, once they are in
        use."""
        if device is not None:
            found = [device] if is_accelerator(device) else []
        else:
            kind = in_use()
            found = [] if kind is None else devices(kind)
        return cls(
            torch.get_rng_state(),
            tuple((one, rng_state(one)) for one in found),
            tuple((one, one.get_state()) for one in own),
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        for device, state in self.others:
            set_rng_state(state, device)
        for one, state in self.own:
            one.set_state(state)

    def still(self) -> bool:
        """Whether nothing was drawn since: as `capture` and `equals` tell, without making another of these."""
        if not _alike(self.cpu, torch.get_rng_state()):
            return False
        return all(torch.equal(state, rng_state(one)) for one, state in self.others) and all(
            torch.equal(state, one.get_state()) for one, state in self.own
        )

    def equals(self, other: "TorchGenerators") -> bool:
        """Nothing was drawn in between."""
        if len(self.others) != len(other.others) or not _alike(self.cpu, other.cpu):
            return False
        if [id(one) for one, _ in self.own] != [id(one) for one, _ in other.own]:
            return False
        pairs = zip((*self.others, *self.own), (*other.others, *other.own), strict=True)
        return all(torch.equal(mine[1], theirs[1]) for mine, theirs in pairs)

    def states(self) -> list[torch.Tensor]:
        """Of all generators."""
        return [self.cpu, *(state for _, state in (*self.others, *self.own))]

    def sharing(self, other: "TorchGenerators") -> "TorchGenerators":
        """The same, with the very states of ``other`` that are equal."""
        known = {id(one): state for one, state in other.own} | dict(other.others)
        return TorchGenerators(
            _one_of(self.cpu, other.cpu),
            tuple((one, _one_of(state, known.get(one))) for one, state in self.others),
            tuple((one, _one_of(state, known.get(id(one)))) for one, state in self.own),
        )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two of the CPU's states are equal: in a fraction of the time of `torch.equal`, at each checkpoint."""
    return one is other or one.numpy().tobytes() == other.numpy().tobytes()


def _one_of(state: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
    return known if known is not None and torch.equal(state, known) else state


@dataclass(frozen=True, slots=True)
class HostGenerators:
    """States of Python's and NumPy's global generators. ``own``: with those of generator objects that user code
    holds."""

    mark: "HostMark"
    numpy: Any
    own: tuple[tuple[Any, Any], ...] = ()  # generator, state

    @classmethod
    def capture(cls, own: Iterable[object] = ()) -> "HostGenerators":
        """The states as they are now. ``own``: objects of `GENERATORS`."""
        while True:
            mark = host_mark()
            with contextlib.suppress(_Drawn):
                return cls(mark, _numpy_state(mark.numpy), tuple((one, state_of(one)) for one in own))

    def restore(self) -> None:
        """Set the generators to these states."""
        if host_mark() != self.mark:  # to look takes a quarter of the time
            random.setstate(self.mark.python)
            numpy.random.set_state(self.numpy)
        for one, state in self.own:
            set_state(one, state)

    def equals(self, other: "HostGenerators") -> bool:
        """Nothing was drawn in between."""
        return self.mark == other.mark and same_states(self.own, other.own)


class HostMark(NamedTuple):
    """Equal as long as nobody draws from Python's or NumPy's generator."""

    python: Any
    numpy: tuple[bytes | str, bytes]


_MT19937_NBYTES = 2500  # the numbers behind NumPy's global generator: 624 words and a place among them
_WAITING_NBYTES = 16  # whether a second normally distributed number waits for the next draw, and that number


def host_mark() -> HostMark:
    """As they are now. To ask NumPy for its state takes a hundred times as long as to copy it from where it lies."""
    drawing: Any = numpy.random.mtrand._rand
    numbers, place = drawing._bit_generator, _place_of_waiting()
    if type(drawing) is not numpy.random.RandomState or type(numbers) is not numpy.random.MT19937 or place is None:
        return HostMark(random.getstate(), (_said(drawing.get_state(legacy=False)), b""))
    words = ctypes.string_at(numbers.ctypes.state_address, _MT19937_NBYTES)
    return HostMark(random.getstate(), (words, ctypes.string_at(id(drawing) + place, _WAITING_NBYTES)))


@lru_cache(maxsize=1)
def _place_of_waiting() -> int | None:
    """Where in a RandomState's memory a number waits that was drawn with another; None where that cannot be seen."""
    if sys.implementation.name != "cpython":  # an object's id does not say where it lies
        return None
    tried, nbytes = numpy.random.RandomState(0), numpy.random.RandomState.__basicsize__
    looks = []
    for _ in range(3):
        looks.append(ctypes.string_at(id(tried) + object.__basicsize__, nbytes - object.__basicsize__))
        tried.standard_normal()
    places = [k for k, (none, one) in enumerate(zip(*looks[:2], strict=True)) if none != one]
    flag = places[0] if places else 0
    found = bool(places) and places[-1] < flag + _WAITING_NBYTES
    found = found and [look[flag] for look in looks] == [0, 1, 0]
    return object.__basicsize__ + flag if found else None


def _said(state: Any) -> str:
    """All of a generator's state as text, long arrays too."""
    if isinstance(state, dict):
        return repr([(key, _said(value)) for key, value in state.items()])
    return repr(state.tobytes() if isinstance(state, numpy.ndarray) else state)


class _Drawn(Exception):
    """Another thread has drawn meanwhile."""


@lru_cache(maxsize=8)
def _numpy_state(mark: tuple[bytes | str, bytes]) -> Any:
    """NumPy's state, asked for when it has this mark: slow (30 microseconds)."""
    state = numpy.random.get_state(legacy=False)
    if host_mark().numpy != mark:
        raise _Drawn
    return state


def same_states(one: Any, other: Any) -> bool:
    """Whether two states, or the same generators with their states, are equal throughout."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_states(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_states, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one is other or numpy.array_equal(one, other)


def state_of(one: Any) -> Any:
    """Of an object of `GENERATORS`. A copy: none of them shows its own."""
    if isinstance(one, random.Random):
        return one.getstate()
    return one.bit_generator.state if isinstance(one, numpy.random.Generator) else one.get_state()


def set_state(one: Any, state: Any) -> None:
    """Set it to what `state_of` gave."""
    if isinstance(one, random.Random):
        one.setstate(state)
    elif isinstance(one, numpy.random.Generator):
        one.bit_generator.state = state
    else:
        one.set_state(state)


@contextlib.contextmanager
def unchanged_generators(device: torch.device | None = None, own: Iterable[object] = ()) -> Iterator[None]:
    """Random generators (``device``: see `TorchGenerators.capture`; ``own``: and these) are afterwards as before."""
    torch_generators, host = TorchGenerators.capture(device), HostGenerators.capture(own)
    try:
        yield
    finally:
        torch_generators.restore()
        host.restore()


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast as the user's call sees it, for the device's type and for the CPU."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def capture(cls, device: torch.device) -> "Autocast":
        """The settings as they are now."""
        return cls(
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in sorted({device.type, "cpu"})
            )
        )

    @property
    def enabled(self) -> bool:
        """Whether any casting takes place."""
        return any(enabled for _, enabled, _ in self.settings)

    def dtype(self, device: torch.device) -> torch.dtype:
        """What ``device``'s operations cast to where casting is enabled."""
        return next(dtype for kind, _, dtype in self.settings if kind == device.type)

    @contextlib.contextmanager
    def entered(self, *, cache: bool) -> Iterator[None]:
        """The same casting inside.

        A stage casts its weights by itself: the global cache would keep casts of weights that have left the device, so
        it is off, or (``cache``, for stages that use one weight twice) cleared on both sides.
        """
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cache and enabled))
            if cache and self.enabled:
                stack.enter_context(_CASTS.left_alone())
            yield


class _UsersCasts:
    """Tells within which of the user's ``autocast`` blocks we are: in each, a weight is cast once for all its uses."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}  # one for each device
        self._casts: dict[torch.device, object] = {}  # their last ones
        self._marks: dict[torch.device, object] = {}  # of these

    def mark(self, device: torch.device) -> object | None:
        """The same object for as long as casts of ``device``'s weights are shared, None where none are."""
        if not (torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()):
            return None
        cast = self._cast(device)
        if self._casts.get(device) is not cast:
            self._casts[device], self._marks[device] = cast, object()
        return self._marks[device]

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Inside, there are no casts; those made there are dropped. Marks last."""
        known = [device for device in self._weights if self.mark(device) is not None]
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            for device in known:
                self._casts[device] = self._cast(device)

    def _cast(self, device: torch.device) -> object:
        """The graph's node of a weight's cast: that of an earlier use, where there was one."""
        if device not in self._weights:
            self._weights[device] = torch.zeros(1, 1, device=device, requires_grad=True)
        with torch.enable_grad():
            product = torch.mm(self._weights[device], self._weights[device].detach())
        assert product.grad_fn is not None
        return product.grad_fn.next_functions[0][0]


_CASTS = _UsersCasts()


def mark_of_autocast(device: torch.device) -> object | None:
    """Two calls for which this is the same object share their weights' casts in plain PyTorch; None: with nobody."""
    return _CASTS.mark(device)
