"""What is the same in many calls: the function, the structure of its arguments, and the constants among them."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from tapestream.accelerator.device import default_generators
from tapestream.errors import InputError
from tapestream.executor.program.calls.arrays import BUFFERS, buffers_in
from tapestream.executor.program.calls.foreign import Foreign, has_objects, indexed, shown_of
from tapestream.executor.program.calls.seams import Apply
from tapestream.executor.program.calls.templates import ATOMS, NUMBERS, PLACE, Place, filled, taken_apart
from tapestream.executor.program.calls.users import is_torchs_own
from tapestream.executor.program.calls.whole import Whole
from tapestream.executor.program.calls.writes import check_allowed, written

_MOST = 1 << 16  # kinds that are remembered
_MOST_CALLS = 1 << 12


@dataclass(frozen=True, slots=True)
class Pattern:
    """One call without its tensors. ``kind`` is equal for calls that differ in constants alone. ``key``: equal for
    equal calls; ``foreign``: the objects that it is given; ``generators``: random generators that are not torch's own
    among its arguments."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    kind: int
    key: Any
    foreign: tuple[Foreign, ...]
    generators: tuple[torch.Generator, ...] = ()

    def call(self, tensors: Iterator[torch.Tensor]) -> Any:
        """The very same call, on ``tensors``."""
        args, kwargs = self.arguments(tensors)
        return self.function(*args, **kwargs) if kwargs else self.function(*args)

    def arguments(self, tensors: Iterator[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """What such a call is given, on ``tensors``."""
        args = [next(tensors) if a is PLACE else filled(a, tensors) for a in self.args]
        return args, {name: filled(value, tensors) for name, value in self.kwargs.items()} if self.kwargs else {}


@dataclass(slots=True)
class Measured:
    """Bytes of calls of one kind on tensors of the same shapes, dtypes and need of gradients, None while not known:
    what a call takes while it runs beside what it leaves; its backward, beside the gradients that it gives; what the
    last one took and left; by the place of a tensor, the memory that its gradient is a part of."""

    transient_nbytes: int | None = None
    reverse_nbytes: int | None = None
    taken_nbytes: int | None = None
    behind_nbytes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Kinds:
    """Numbers of kinds, and what is known of them, the same for all calls of a program. ``quiet``: calls of torch's
    functions that draw no random numbers."""

    numbers: dict[Any, int] = field(default_factory=dict)
    measured: dict[Any, Measured] = field(default_factory=dict)
    quiet: set[Any] = field(default_factory=set)
    first: int = 0

    def number(self, key: Any) -> int:
        """That of ``key``, a new one if it was never seen."""
        return self.numbers.setdefault(key, self.first + len(self.numbers))

    def copy(self) -> "Kinds":
        """The same, to go on by itself."""
        measured = {key: replace(one) for key, one in self.measured.items()}
        return Kinds(dict(self.numbers), measured, set(self.quiet), self.first)

    def trim(self) -> None:
        """Begin anew where there are too many (of shapes that never come again, say); no number comes twice."""
        if len(self.numbers) + len(self.measured) + len(self.quiet) > _MOST:
            self.first += len(self.numbers)
            self.numbers.clear()
            self.measured.clear()
            self.quiet.clear()


@dataclass(slots=True)
class Call:
    """What is known of calls with equal patterns on tensors of the same shapes, dtypes and need of gradients.

    ``needs``: which of their tensors require a gradient; ``into``: which they say that they write into; ``attribute``:
    the name of the attribute of a tensor that they ask for, if any; ``number``: that of the pattern in its record, None
    for one that is not recorded; ``buffers``: the arrays that the call is given, which is one of a kind then;
    ``shown``: what objects show that it is given (see `foreign.shown`), as they are before it; ``quiet``: they draw no
    random numbers; ``like``: the same for equal calls of all records, None where that cannot be told.
    """

    pattern: Pattern
    measured: Measured
    needs: list[bool]
    into: tuple[int, ...]
    attribute: str | None
    number: int | None = None
    buffers: Sequence[Any] = ()
    shown: Any = ()
    quiet: bool = False
    like: Any = None


class Patterns:
    """The patterns of one record, each held once."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds, self.all = kinds, list[Pattern]()
        self._numbers: dict[Any, int] = {}
        self._calls: dict[Any, Call] = {}

    def of(self, function: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Call:
        """What is known of a call, as it is before the call; its tensors are added to ``tensors`` in order.

        Raises InputError and GradientError for what a replay could not do again.
        """
        key, shapes = self._key_of(function, args, kwargs, tensors)
        found = self._calls.get((key, shapes))
        if found is None:
            check_allowed(function)
            if is_torchs_own(function) and has_objects(key):
                args, kwargs = indexed(args), indexed(kwargs)
                tensors.clear()
                key, shapes = self._key_of(function, args, kwargs, tensors)
            found = self._new(key, shapes, function, args, kwargs, tensors)
        return found

    @staticmethod
    def _key_of(function: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> tuple[Any, Any]:
        """Equal for equal calls, and for tensors of the same shapes, dtypes and need of gradients, of which the same
        are given twice (attention on the same query, key and value makes other operations)."""
        key = function, *constants_of(args, kwargs, tensors)
        try:
            shapes: tuple[Any, ...] = tuple([(t.shape, t.dtype, t.requires_grad) for t in tensors])
        except RuntimeError as error:
            raise (shapeless(function, tensors) or error) from None
        ids = [id(t) for t in tensors]
        if len(set(ids)) < len(ids):
            shapes = tuple([(*shape, ids.index(one)) for shape, one in zip(shapes, ids, strict=True)])
        return key, shapes

    def _new(self, key: Any, shapes: Any, function: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Call:
        pattern = self._of(key, function, args, kwargs)
        measured = self.kinds.measured.setdefault((pattern.kind, *shapes), Measured())
        needs = [one[2] for one in shapes]
        into, attribute = _into(pattern, tensors), attribute_of(function)
        buffers, showing = buffers_in((args, kwargs)), shown_of(pattern.foreign)
        lasting = not (pattern.foreign or buffers or pattern.generators) and is_lasting(function)
        like = (key, shapes) if lasting else None
        quiet = like in self.kinds.quiet
        number = self._numbers.get(key)
        found = Call(pattern, measured, needs, into, attribute, number, buffers, showing, quiet, like)
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        if not (pattern.foreign or buffers):
            self._calls[key, shapes] = found
        return found

    def _of(self, key: Any, function: Any, args: Any, kwargs: Any) -> Pattern:
        number = self._numbers.get(key)
        if number is not None:
            return self.all[number]
        kind, foreign = self.kinds.number(_without_constants((_kind_of(function), *key[1:]))), list[Foreign]()
        kept = {name: taken_apart(value, foreign) for name, value in kwargs.items()} if kwargs else None
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Generator)]
        own = tuple(one for one in given if not _is_default(one))
        return Pattern(function, tuple(taken_apart(a, foreign) for a in args), kept, kind, key, tuple(foreign), own)

    def draws_nothing(self, call: Call) -> None:
        """Such a call has drawn no random numbers, and none will."""
        call.quiet = True
        if call.like is not None:
            self.kinds.quiet.add(call.like)

    def adopted(self, pattern: Pattern) -> int:
        """The number of a pattern of another record, in this one."""
        number = self._numbers.setdefault(pattern.key, len(self.all))
        if number == len(self.all):
            self.all.append(pattern)
        return number

    def number(self, call: Call, results: Sequence[torch.Tensor]) -> int:
        """That of the pattern of a call that is recorded, whose objects live as long as the graph of its results."""
        if call.pattern.foreign:
            for one in call.pattern.foreign:
                one.keep_with(results)
        if call.number is None:
            call.number = self._numbers.setdefault(call.pattern.key, len(self.all))
            if call.number == len(self.all):
                self.all.append(call.pattern)
        return call.number


def shapeless(function: Any, tensors: Sequence[torch.Tensor]) -> InputError | None:
    """Why tensors without shapes cannot be kept."""
    name = getattr(function, "__name__", function)
    if any(t.is_nested for t in tensors):
        return InputError(
            f"Program: {name} is given a nested tensor, which programs cannot keep (an nn.TransformerEncoder makes one "
            "of a padding mask if no gradient is needed): make the encoder with enable_nested_tensor=False, or call it "
            "before the program and pass its result in"
        )
    if any(map(is_lazy, tensors)):
        return InputError(
            f"Program: {name} is given a parameter of a lazy module that was never called; call the module once before "
            "the program"
        )
    return None


def tensors_of(result: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a call's result in a fixed order, added to ``found``."""
    if isinstance(result, torch.Tensor):
        found.append(result)
    elif isinstance(result, (tuple, list)):
        for item in result:
            tensors_of(item, found)
    elif isinstance(result, dict):
        for item in result.values():
            tensors_of(item, found)
    return found


def _into(pattern: Pattern, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """By place: a later call may give one tensor twice, or two instead."""
    apart = [torch.empty(0, device="cpu") for _ in tensors]
    args, kwargs = pattern.arguments(iter(apart))
    into = written(pattern.function, args, kwargs)
    return tuple(place for place, tensor in enumerate(apart) if any(tensor is one for one in into))


def is_lasting(function: Any) -> bool:
    """Whether it is PyTorch's own, and so may be held beyond the call of a program."""
    return is_torchs_own(function) or str(getattr(function, "__module__", "")).startswith("torch.")


def constants_of(args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> tuple[Any, Any]:
    """Equal for calls that are given the same beside tensors, which are added to ``tensors`` in order."""
    parts = list[Any]()
    for value in args:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            parts.append(PLACE)
        else:
            parts.append(_key(value, tensors))
    return tuple(parts), _key(kwargs, tensors) if kwargs else None


def attribute_of(function: Any) -> str | None:
    """The name of the attribute of a tensor that it asks for, if any."""
    asks = getattr(function, "__name__", None) == "__get__"
    return getattr(getattr(function, "__self__", None), "__name__", None) if asks else None


def _key(value: Any, tensors: list[torch.Tensor]) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return kind, value  # with its type, since 1 == 1.0 == True
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return PLACE
    if kind is float:
        return kind, value, math.copysign(1.0, value)
    if isinstance(value, (tuple, list)):
        return kind, tuple([_key(item, tensors) for item in value])
    if kind is dict:
        return kind, tuple([(name, _key(item, tensors)) for name, item in value.items()])
    if kind is slice:
        return kind, tuple([_key(item, tensors) for item in (value.start, value.stop, value.step)])
    if isinstance(value, torch.Generator):
        return kind, str(value.device) if _is_default(value) else id(value)
    if isinstance(value, NUMBERS):
        return kind, value.tobytes()
    if isinstance(value, BUFFERS):
        return Place, kind, object()  # may be written into later: a copy of its own each time
    return Place, kind, Foreign(value)


def _is_default(generator: torch.Generator) -> bool:
    return generator is torch.default_generator or any(generator is one for one in default_generators())


def _without_constants(key: Any) -> Any:
    """``key`` with types in place of numbers."""
    if not isinstance(key, tuple):
        return key
    if len(key) >= 2 and key[0] in (int, float, complex):
        return key[0]
    if len(key) == 3 and key[0] is Place:
        return key[1].__module__, key[1].__qualname__
    return tuple([_without_constants(item) for item in key])


def _kind_of(function: Any) -> Any:
    """What tells a function from others, without holding a class or module that the program itself has made."""
    if isinstance(function, Apply):
        return type(function), function.cls.__module__, function.cls.__qualname__
    if hasattr(function, "key"):  # a gradient taken inside
        return type(function), function.key
    return weakref.ref(function.module) if isinstance(function, Whole) else function
