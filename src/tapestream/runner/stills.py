"""State that a stage reads beside its input, and that must not change between the call and its backward: a recompute
would read the new state.
"""

import contextlib
import functools
import types
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as every

from tapestream.capture.attributes import Attribute, AttributesRead
from tapestream.capture.buffers import ABSENT, NUMBERS, BufferSnapshot, Slot
from tapestream.capture.cells import Cell
from tapestream.capture.python_state import attributes_of
from tapestream.errors import GradientError
from tapestream.runner.hooks import flags_of, holding, hooks_of
from tapestream.runner.reads import Reads, containers_read, marks_in, reads_of, version_of

_EVERY_HOOKS: tuple[dict[Any, Any], ...] = (
    every._global_forward_hooks, every._global_forward_pre_hooks, every._global_backward_hooks,
    every._global_backward_pre_hooks,
)  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_ATTRIBUTES, _MODULES, _PARAMETERS, _BUFFERS = range(4)
_PLACES = 8  # dictionaries of a module that are looked at: these, and four of hooks
_HOOK = "a hook"


@dataclass(slots=True)
class Look:
    """What a stage reads, at one moment. ``held``: what the dictionaries of modules hold, with its ``keys``, dictionary
    by dictionary (``ends``). ``still``: buffers and frozen parameters, with their ``versions``. ``captured``: what
    functions have captured; ``marks``: the content of what may be written into among that. ``numbers``: what
    ``attributes`` of other objects hold; ``flags``: of hooks, module by module.
    """

    held: list[Any]
    keys: list[Any]
    ends: list[int]
    still: list[torch.Tensor]
    versions: list[int]
    captured: list[Any]
    marks: list[Any]
    attributes: tuple[Attribute, ...]
    numbers: list[Any]
    flags: list[dict[Any, Any]]

    def same(self, now: "Look") -> bool:
        """Whether all that is held is the very same. If not, it may still be equal."""
        return (
            self.versions == now.versions and self.marks == now.marks
            and _identical(self.held, now.held) and _identical(self.captured, now.captured)
            and _identical(self.still, now.still) and _identical(self.numbers, now.numbers)
        )  # fmt: skip

    def of(self, place: int) -> dict[Any, Any]:
        """One of the dictionaries."""
        first, end = (self.ends[place - 1] if place else 0), self.ends[place]
        return dict(zip(self.keys[first:end], self.held[first:end], strict=True))


class Stills:
    """Where ``modules`` hold what they read. It is looked at after the first run of a stage and before each recompute,
    so that most is done by comparing what is held by identity; where to look is found anew when that has changed."""

    __slots__ = (
        "_attributes",
        "_containers",
        "_dicts",
        "_ends",
        "_flags",
        "_functions",
        "_held",
        "_keys",
        "_made",
        "_named",
        "_objects",
        "_plain",
        "counts",
        "draws_host",
        "late",
        "modules",
        "threaded",
    )

    def __init__(self, modules: Sequence[nn.Module], threaded: Sequence[Slot] = ()) -> None:
        self.modules = tuple(modules)
        self.threaded = tuple(threaded)  # buffers that every run is given, and which may be others in between
        self.late = tuple[Slot, ...]()  # buffers that it writes at times, though not when it was profiled
        self.draws_host = False  # the same of Python's and NumPy's generators
        # By kinds of slots (see `kinds_of`), whether recomputes need what they hold after the first run.
        self.counts = dict[object, bool]()
        self._held: list[Any] | None = None
        self._keys, self._ends = list[Any](), list[int]()
        self._made = list[int]()  # where among ``_held`` attributes are tensors
        self._dicts, self._flags = list[dict[Any, Any]](), list[dict[Any, Any]]()
        self._functions = list[Reads]()
        self._plain = list[nn.Parameter]()
        self._containers = list[Any]()
        self._objects, self._named = list[Any](), list[Any]()
        self._attributes: AttributesRead | None = None

    def look(self, function: Any, written: Sequence[Slot], cells: Sequence[Cell]) -> Look:
        """At what the stage ``function`` with these modules sees now. ``written`` and ``cells``: what it writes into
        itself, which recomputes get back in another way (see `BufferSnapshot`)."""
        if self._held is None or not _identical(self._holding(), self._held):
            self._find()
        if self._attributes is None or self._attributes.lead_elsewhere():
            self._attributes = AttributesRead.of((function, *self._named), self.modules)
        buffers = chain.from_iterable(map(dict.values, self._dicts[_BUFFERS : _PLACES * len(self.modules) : _PLACES]))
        own = {id(module._buffers.get(name)) for module, name in (*written, *self.threaded)}
        still = [b for b in buffers if b is not None and id(b) not in own]
        still += [p for p in self._plain if not p.requires_grad]
        captured, marks = list[Any](), list[Any]()
        for reads in (*self._functions, *reads_of(function)):
            reads.into(captured, marks, cells)
        for container in self._containers:
            marks += marks_in(container, cells)
        assert self._held is not None
        versions, numbers = [version_of(t) for t in still], [one.now() for one in self._attributes.numbers]
        return Look(
            self._held, self._keys, self._ends, still, versions, captured, marks, self._attributes.numbers, numbers,
            self._flags,
        )  # fmt: skip

    def _holding(self) -> list[Any]:
        """What the dictionaries hold now. Tensors that are attributes (what hooks make from parameters, the last
        result) are not held from here: the module drops them when it runs again, and nothing compares them."""
        held = [*chain.from_iterable(map(dict.values, self._dicts))]
        for at in self._made:
            if at < len(held) and isinstance(held[at], torch.Tensor):
                held[at] = torch.Tensor
        return held

    def _find(self) -> None:
        self._dicts = [
            place
            for m in self.modules
            for place in (attributes_of(m), m._modules, m._parameters, m._buffers, *hooks_of(m))
        ]
        self._flags = [dict(flags) for m in self.modules for flags in flags_of(m)]
        self._dicts += _EVERY_HOOKS
        sizes, own, self._made = [*map(len, self._dicts)], self._dicts[: _PLACES * len(self.modules) : _PLACES], []
        for start, attributes in zip([0, *accumulate(sizes)][::_PLACES], own, strict=False):
            self._made += [start + at for at, one in enumerate(attributes.values()) if isinstance(one, torch.Tensor)]
        self._held = self._holding()
        self._keys = [*chain.from_iterable(self._dicts)]
        self._ends = [*accumulate(map(len, self._dicts))]
        parameters = {id(p): p for m in self.modules for p in m._parameters.values() if p is not None}
        self._plain = list(parameters.values())
        forwards = {id(type(m)): type(m).forward for m in self.modules}
        functions = [f for f in forwards.values() if not str(f.__module__).startswith("torch.")]
        functions += [value for m in self.modules for value in attributes_of(m).values() if type(value) in _FUNCTIONS]
        self._functions = [reads for function in functions for reads in reads_of(function)]
        found = (one for m in self.modules for one in containers_read(m))
        self._containers = list({id(one): one for one in found}.values())
        objects = [value for value in self._held if type(value) not in NUMBERS]
        if not _identical(objects, self._objects):  # a walk takes long, and modules count
            self._objects, self._named, self._attributes = objects, functions, None

    def check(
        self, name: str, then: Look, now: Look, written: Sequence[Slot]
    ) -> contextlib.AbstractContextManager[None]:
        """Raise GradientError with the name of what a recompute would see other than it was. Within what is returned,
        it sees the hooks that its modules had (a library may register some for the time of a call)."""
        if then.same(now):
            return contextlib.nullcontext()
        found = [*self._differing(then, now, (*written, *self.threaded)), *_of_objects(then, now)]
        hooked = [one.module for one in found if one.what is _HOOK]
        if len(hooked) < len(found):
            changed = next(one for one in found if one.what is not _HOOK)
            raise GradientError(
                f"{name}: {self._what(changed)} was changed between the call and its backward, so recomputing would "
                "give other values; run backward first, or undo the change"
            )
        return holding([pair for k, m in enumerate(self.modules) if m in hooked for pair in _hooks_then(k, m, then)])

    def changed_by_itself(self, name: str, before: Look, after: Look, written: Sequence[Slot]) -> BufferSnapshot | None:
        """What the stage's own run has changed, unlike the profiled one, as it was before: numbers, and buffers in
        whose place it has put others. Raises GradientError for the rest, buffers that it has written into among it,
        which are looked after from the next call on."""
        if before.same(after):
            return None
        found = self._differing(before, after, written)
        lost = [one for one in found if one.slot is None or one.before is _LOST]
        if lost:
            self.expect([one.slot for one in found if one.slot is not None])
            all_known = all(one.slot is not None for one in lost)
            raise GradientError(
                f"{name}: {self._what(lost[0])} was changed by the stage itself, which it did not do when it was "
                "profiled, so a recompute would see the new value; "
                + ("from the next call on the old value is kept: run the step again" if all_known else
                   "give it to the stage as an argument, or keep it as a buffer or number of a module")
            )  # fmt: skip
        return _before(found)

    def counted(self, before: Look, after: Look, written: Sequence[Slot]) -> BufferSnapshot | None:
        """Numbers that are not what they were, and buffers in whose place others are, as they were."""
        found = [] if before.same(after) else self._differing(before, after, (*written, *self.threaded))
        return _before([one for one in found if one.before is not _LOST])

    def expect(self, slots: Sequence[Slot]) -> None:
        """From the next call on, keep what is in these slots, and in those of the same name of modules of the same
        class."""
        names = {(type(module), name) for module, name in slots}
        like = [(m, name) for m in self.modules for kind, name in names if type(m) is kind]
        there = ((m, name) for m, name in like if name in m._buffers or name in vars(m))
        self.late = tuple(dict.fromkeys((*self.late, *there)))

    def learn(self, kinds: object, after: bool) -> None:
        """Of what is counted, recomputes need the value after the first run, or before it."""
        self.counts[kinds] = after

    def _what(self, one: "_Difference") -> str:
        return one.what if one.module is None else f"{one.what} of a {type(one.module).__name__}"

    def _differing(self, then: Look, now: Look, written: Sequence[Slot]) -> list["_Difference"]:
        """All that is not what it was, compared by value."""
        own, found = {(id(module), name) for module, name in written}, list[_Difference]()
        changed = {id(t) for t, version in zip(then.still, then.versions, strict=True) if version_of(t) != version}
        frozen, frozen_now = set(map(id, then.still)), set(map(id, now.still))
        for k, module in enumerate(self.modules):
            places = [(then.of(place), now.of(place)) for place in range(_PLACES * k, _PLACES * (k + 1))]
            found += _of_attributes(module, *places[_ATTRIBUTES], own)
            if any([*map(id, a.values())] != [*map(id, b.values())] for a, b in places[_MODULES : _PARAMETERS + 1]):
                found.append(_Difference("a module or parameter", module))
            if any([*a] != [*b] for a, b in places[_BUFFERS + 1 :]):
                found.append(_Difference(_HOOK, module))
            found += _of_buffers(module, *places[_BUFFERS], own, changed)
            parameters = [p for p in places[_PARAMETERS][0].values() if p is not None]
            if any(id(p) in changed or (id(p) in frozen) != (id(p) in frozen_now) for p in parameters):
                found.append(_Difference("a buffer or frozen parameter", module))
        around = range(_PLACES * len(self.modules), len(now.ends))
        hooked = any([*then.of(place)] != [*now.of(place)] for place in around)
        if hooked or _numbers(then.captured) != _numbers(now.captured) or then.marks != now.marks:
            found.append(_Difference("a value or tensor that it has captured, or a hook on all modules,", None))
        return found


class _Lost:
    """It was written into: what it held before is gone."""


_LOST = _Lost()


class _Difference(NamedTuple):
    """``slot``: where, if it is a buffer or number; ``before``: what was there."""

    what: str
    module: nn.Module | None
    slot: Slot | None = None
    before: Any = None


def _hooks_then(k: int, module: nn.Module, then: Look) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
    """What the dictionaries of module ``k``'s hooks, and of what is said of them, were."""
    for place, hooks in enumerate(hooks_of(module), _PLACES * k + _BUFFERS + 1):
        yield hooks, then.of(place)
    now = flags_of(module)
    yield from zip(now, then.flags[len(now) * k : len(now) * (k + 1)], strict=True)


def _before(found: Sequence[_Difference]) -> BufferSnapshot | None:
    pairs = [(one.slot, one.before) for one in found if one.slot is not None]
    return BufferSnapshot(tuple(slot for slot, _ in pairs), tuple(before for _, before in pairs)) if pairs else None


def _of_attributes(
    module: nn.Module, old: dict[str, Any], new: dict[str, Any], own: Container[tuple[int, str]]
) -> Iterator[_Difference]:
    for name in dict.fromkeys((*old, *new)):
        a, b = old.get(name, ABSENT), new.get(name, ABSENT)
        counts = type(a) in NUMBERS or type(b) in NUMBERS
        if counts and (type(a) is not type(b) or a != b) and (id(module), name) not in own:
            known = type(a) in NUMBERS or a is ABSENT
            yield _Difference(repr(name), module, (module, name) if known else None, a)


def _of_buffers(
    module: nn.Module,
    old: dict[str, Any],
    new: dict[str, Any],
    own: Container[tuple[int, str]],
    changed: Container[int],
) -> Iterator[_Difference]:
    for name, buffer in old.items():
        if buffer is None or (id(module), name) in own:
            continue
        if id(buffer) in changed:
            yield _Difference("a buffer or frozen parameter", module, (module, name), _LOST)
        elif name not in new or not _equal(buffer, new[name]):
            yield _Difference("a buffer or frozen parameter", module, (module, name), buffer)


def _of_objects(then: Look, now: Look) -> Iterator[_Difference]:
    """Numbers of objects that are no modules; another object in one's place may hold the same."""
    alike = [one.name for one in then.attributes] == [one.name for one in now.attributes]
    keys = [range(len(look.attributes)) if alike else [(id(one.holder), one.name) for one in look.attributes]
            for look in (then, now)]  # fmt: skip
    new = dict(zip(keys[1], now.numbers, strict=True))
    for key, one, value in zip(keys[0], then.attributes, then.numbers, strict=True):
        other = new.get(key, value)
        if type(value) is not type(other) or value != other:
            yield _Difference(f"{one.owner}.{one.name}", None)


def _identical(a: list[Any], b: list[Any]) -> bool:
    return a is b or (len(a) == len(b) and all(map(is_, a, b)))


def _equal(a: Any, b: Any) -> bool:
    """Another tensor in its place may hold the same."""
    if a is b or a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and bool(torch.equal(a, b))


def _numbers(captured: Sequence[Any]) -> list[Any]:
    return [value for value in captured if type(value) in NUMBERS]
