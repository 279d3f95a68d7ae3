"""`Record`: the trace of a program in numbers, a few dozen bytes an operation."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy
import torch

from tapestream.capture.fused_steps import fused_steps
from tapestream.errors import GradientError
from tapestream.executor.program.calls.arrays import Arrays
from tapestream.executor.program.calls.hidden import Hidden
from tapestream.executor.program.calls.patterns import Kinds, Pattern, Patterns
from tapestream.executor.program.calls.users import by_user
from tapestream.executor.program.calls.values import Ref, address_of
from tapestream.executor.program.record.settled import Settled, settled_in
from tapestream.executor.program.record.unread import Unread, unread_in
from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.counts import Digest

ALIVE = 2**31 - 1
"""Where the program has not let go of a value."""
OTHERS, MAYBE_OWN = 1, 2
"""Of a storage: it is that of an external tensor, which the program may have made before it was noted."""
MIXED = -1
"""The operation saves inputs and its own results in mixed order."""


class Ambient(NamedTuple):
    """What surrounds an operation. ``casts``: per kind of device, the dtype of autocast, None where it is off;
    ``epoch``: how often the cache of casts had been cleared; ``kernels``: what chooses between them; ``modes`` and
    ``dispatching``: the function modes, and the dispatch modes, of others."""

    grad: bool
    casts: tuple[tuple[str, torch.dtype | None], ...]
    cache: bool
    dtype: torch.dtype
    epoch: int
    kernels: tuple[Any, ...]
    modes: tuple[Any, ...]
    dispatching: tuple[Any, ...]

    def alike(self) -> tuple[Any, ...]:
        """Equal for ambients that plans may be shared by: function modes count by their class. Dispatch modes, which
        may count or print, do not: what they change shows in what operations make and save."""
        return *self[:-2], *map(type, self.modes)


def look(before: int, tensor: torch.Tensor) -> int:
    """A number for the shapes and dtypes of saved tensors, ``before`` being that of those before this one."""
    return hash((before, tensor.shape, tensor.dtype))


def looks_of(tensors: Iterable[torch.Tensor]) -> int:
    """A number for shapes, dtypes, strides and all else that functions go by that are given such tensors."""
    try:
        return hash(tuple([
            (t.shape, t.dtype, t.requires_grad, t.device, t.stride() if t.layout is torch.strided else t.layout,
             t.is_conj(), t.is_neg())
            for t in tensors
        ]))  # fmt: skip
    except RuntimeError:  # a nested tensor, which has no shape and which nothing is done with
        return 0


@dataclass(slots=True)
class External:
    """A tensor that the program did not make. ``version``: when it was last seen, at operation ``at`` or later, and
    when the program had ended; ``first_use``: at which operation it was first seen. ``requires``: whether it needed a
    gradient then; ``takes``: whether it ever did. ``held``: the same without its graph, over the memory that it had at
    first; ``looks``: how it looks to functions; ``own``: the program has made it, before it was noted;
    ``steps``: those of fused optimizers, which move no version."""

    tensor: torch.Tensor
    storage: int
    leaf: bool
    held: torch.Tensor
    version: int
    at: int
    requires: bool = False
    takes: bool = False
    last_use: int = -1
    first_use: int = -1
    looks: int = 0
    own: bool = False
    steps: int = 0

    def again(self) -> torch.Tensor:
        """The tensor for a replay, with the need of a gradient that it had: it may have been frozen since, or not be
        any more. Raises GradientError where it is not what it was when the program had ended."""
        tensor = self.tensor
        if tensor._version != self.version or fused_steps(tensor) != self.steps:
            raise GradientError(
                f"Program: a tensor of shape {tuple(tensor.shape)} that the program used was modified in place after "
                "the program had run (by an optimizer, or as a gradient that backward adds to), so replays would use "
                "the new values; run backward before the optimizer's step, or clone() the tensor"
            )
        if tensor.layout is torch.strided and address_of(tensor) != address_of(self.held):
            raise GradientError(
                f"Program: the memory of a tensor of shape {tuple(tensor.shape)} that the program used was replaced "
                "(its .data was set, or its module moved or cast) since it was first used, so replays would use other "
                "values; run backward before that"
            )
        return tensor if tensor.requires_grad == self.requires else tensor.detach().requires_grad_(self.requires)


@dataclass(slots=True)
class Record:
    """Operations by number: pattern, ambient, arguments, results, seconds; of what autograd saved, the storages, how
    often it saved (``packs``), how many of these it is given, before those that it has made (``given``, or `MIXED`),
    the shapes and dtypes (``looks``, see `look`), and the bytes that no value shows (``inner_nbytes``: made inside);
    ``transient_nbytes`` that it takes while it runs, ``reverse_nbytes`` while backward reverses it, ``taken_nbytes``
    with what it makes; ``outcomes``: how what it gives looks then, and what it has changed (see
    `looks_of`).

    Values (tensors made by operations) by number: the operation that made it, the last one that uses it, the one
    before which the program let go of it (`ALIVE`: it has not), its storage, the bytes of its cotangent. An argument
    is a value's number, or ``~k`` for external tensor k. ``writes``: by storage, the operations that write into it.
    ``drawn``: the operations that draw; ``draws_nbytes``: what a restart checkpoint takes for the states of generators,
    0 where the program draws nothing; ``own``: generators that are not torch's, by id, with their states before
    operations were given them first.
    ``switched``: it has said of tensors of others that they need a gradient or not; ``needs``: by operation, which of
    them had another need then than at first.
    ``untried``: the operations of which it is not known for good what they take.
    ``arrays``: of others', that backward needs. ``hidden``: of each opaque operation. ``spoilt``: why nothing may be
    run again. ``asking``: functions of calls that made nothing, and are not noted.
    ``gained``: values that came to require a gradient by a write, with the operation that wrote.
    ``leaves_written``: the operations that write into leaves that require a gradient, with these; ``unseen_writes``:
    those that do so through ``.data``, with the storage. ``handed_over``: storages that became those of tensors of
    others (``.data = value``), with the next operation. ``uncopied``: storages of leaves that
    were written into before they were used, as it seemed then (see `Settled`). ``departed``: the
    first operations of the program, or some in between, were not noted. ``unreached``: operations that
    no backward is to reach (see `Unreached`). ``digests``: what tells the bits that each operation made, None where
    replays are not asked for the same.
    """

    kinds: Kinds
    patterns: Patterns = field(init=False)
    ambients: list[Ambient] = field(default_factory=list)
    calls: "array[int]" = field(default_factory=lambda: array("I"))
    ambient: "array[int]" = field(default_factory=lambda: array("I"))
    seconds: "array[float]" = field(default_factory=lambda: array("f"))
    saves: "array[int]" = field(default_factory=lambda: array("i"))
    save_ends: "array[int]" = field(default_factory=lambda: array("I"))
    packs: "array[int]" = field(default_factory=lambda: array("I"))
    given: "array[int]" = field(default_factory=lambda: array("i"))
    looks: "array[int]" = field(default_factory=lambda: array("q"))
    inner_nbytes: "array[int]" = field(default_factory=lambda: array("q"))
    transient_nbytes: "array[int]" = field(default_factory=lambda: array("q"))
    reverse_nbytes: "array[int]" = field(default_factory=lambda: array("q"))
    taken_nbytes: "array[int]" = field(default_factory=lambda: array("q"))
    outcomes: "array[int]" = field(default_factory=lambda: array("q"))
    arguments: "array[int]" = field(default_factory=lambda: array("i"))
    argument_ends: "array[int]" = field(default_factory=lambda: array("I"))
    results: "array[int]" = field(default_factory=lambda: array("i"))
    result_ends: "array[int]" = field(default_factory=lambda: array("I"))
    birth: "array[int]" = field(default_factory=lambda: array("i"))
    last_use: "array[int]" = field(default_factory=lambda: array("i"))
    death: "array[int]" = field(default_factory=lambda: array("i"))
    cotangent_nbytes: "array[int]" = field(default_factory=lambda: array("q"))
    storage: "array[int]" = field(default_factory=lambda: array("i"))
    storage_nbytes: "array[int]" = field(default_factory=lambda: array("q"))
    storage_external: "array[int]" = field(default_factory=lambda: array("b"))
    writes: "dict[int, array[int]]" = field(default_factory=dict)
    externals: list[External] = field(default_factory=list)
    drawn: "array[int]" = field(default_factory=lambda: array("I"))
    untried: "array[int]" = field(default_factory=lambda: array("I"))
    draws_nbytes: int = 0
    own: dict[int, tuple[torch.Generator, torch.Tensor]] = field(default_factory=dict)
    switched: bool = False
    needs: dict[int, dict[int, bool]] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=Arrays)
    hidden: dict[int, Hidden] = field(default_factory=dict)
    spoilt: str | None = None
    asking: set[Any] = field(default_factory=set)
    leaves_written: list[tuple[int, int]] = field(default_factory=list)
    unseen_writes: list[tuple[int, int]] = field(default_factory=list)
    handed_over: dict[int, int] = field(default_factory=dict)
    gained: dict[int, int] = field(default_factory=dict)
    uncopied: set[int] = field(default_factory=set)
    departed: bool = False
    unreached: frozenset[int] = frozenset()
    digests: list[Digest] | None = None
    _unread: Unread | None = field(default=None, init=False)
    _settled: Settled | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.patterns = Patterns(self.kinds)

    def __len__(self) -> int:
        return len(self.calls)

    def arguments_of(self, k: int) -> "array[int]":
        """What operation ``k`` is given."""
        return self.arguments[self.argument_ends[k - 1] if k else 0 : self.argument_ends[k]]

    def results_of(self, k: int) -> "array[int]":
        """What operation ``k`` gives."""
        return self.results[self.result_ends[k - 1] if k else 0 : self.result_ends[k]]

    def saves_of(self, k: int) -> "array[int]":
        """The storages of values that operation ``k`` saves."""
        return self.saves[self.save_ends[k - 1] if k else 0 : self.save_ends[k]]

    def saves_given(self, number: int) -> bool:
        """Whether an operation that is given a tensor has saved anything."""
        return any(self.packs[k] and number in self.arguments_of(k) for k in range(len(self)))

    @property
    def unread(self) -> Unread:
        """What is written into and never read, when the program has ended."""
        if self._unread is None:
            self._unread = unread_in(self)
        return self._unread

    @property
    def settled(self) -> Settled:
        """What is written into before it is read, when the program has ended."""
        if self._settled is None:
            self._settled = settled_in(self, self.unread.storages)
        return self._settled

    @property
    def left_alone(self) -> frozenset[int]:
        """Storages that it writes into and of which no restart checkpoint need hold anything."""
        return self.unread.storages | self.settled.storages

    @property
    def idle(self) -> frozenset[int]:
        """Operations that no replay makes."""
        return self.unread.idle | self.settled.idle | self.unreached

    def generators(self) -> TorchGenerators:
        """The states, now, of torch's generators and of others that operations were given."""
        return TorchGenerators.capture(own=[one for one, _ in self.own.values()])

    def restore(self, generators: TorchGenerators) -> None:
        """Set generators to these states; those that operations were given only afterwards, to that before the first
        of these."""
        for one, state in self.own.values():
            one.set_state(state)
        generators.restore()

    def of_users(self) -> frozenset[int]:
        """The operations that users have written, which may do anything; the others are torch's calls alone."""
        own = {call for call, one in enumerate(self.patterns.all) if by_user(one.function) or one.foreign}
        return frozenset(k for k, call in enumerate(self.calls) if call in own) if own else frozenset()

    def used_between(self, first: int, end: int) -> set[int]:
        """What the operations ``first`` .. ``end`` - 1 are given."""
        return set(self.arguments[self.argument_ends[first - 1] if first else 0 : self.argument_ends[end - 1]])

    def storage_of(self, number: int) -> int:
        """That of a value, or of an external tensor."""
        return self.storage[number] if number >= 0 else self.externals[~number].storage

    def showing_written(self) -> dict[int, list[int]]:
        """By storage that some operation writes into, the values and external tensors that show it."""
        found: dict[int, list[int]] = {storage: [] for storage in self.writes}
        if found:
            storages = numpy.asarray(self.storage)
            for number in numpy.flatnonzero(numpy.isin(storages, list(found))).tolist():
                found[self.storage[number]].append(number)
            for k, external in enumerate(self.externals):
                if external.storage in found:
                    found[external.storage].append(~k)
        return found

    def pattern(self, k: int) -> Pattern:
        """The call of operation ``k``."""
        return self.patterns.all[self.calls[k]]

    def see(self, one: "Ref | External", tensor: torch.Tensor) -> None:
        """``tensor`` is used: something that no torch call showed may have written into it since it was last seen."""
        if tensor._version == one.version:
            return
        if not self.written_since(one.storage, one.at):
            self.spoilt = (
                f"a tensor of shape {tuple(tensor.shape)} was written into inside the program without a torch call (by "
                "another thread, a C++ extension, an autograd.Function that captured it)"
            )
        one.version, one.at = tensor._version, len(self)

    def write(self, storage: int, k: int) -> None:
        """Operation ``k`` writes into ``storage``."""
        self.writes.setdefault(storage, array("i")).append(k)

    def written_since(self, storage: int, operation: int) -> bool:
        """Whether ``operation`` or a later one writes into ``storage``."""
        found = self.writes.get(storage)
        return found is not None and found[-1] >= operation

    def shape(self) -> tuple[Any, ...]:
        """Equal for records that one plan serves: the same kinds of calls on the same values, of which the same is
        known (a later call may find out what an earlier one had no room to try)."""
        found = blake2b(array("I", [self.patterns.all[call].kind for call in self.calls]))
        for values in (self.ambient, self.arguments, self.argument_ends, self.results, self.storage,
                       self.storage_nbytes, self.saves, self.save_ends, self.packs, self.given,
                       self.inner_nbytes, self.cotangent_nbytes, self.transient_nbytes, self.reverse_nbytes,
                       self.drawn):  # fmt: skip
            found.update(len(values).to_bytes(8, "little"))
            found.update(values)
        written = tuple((s, tuple(ops)) for s, ops in sorted(self.writes.items()))
        outside = tuple((e.takes, e.leaf, e.storage) for e in self.externals)
        return found.digest(), tuple(a.alike() for a in self.ambients), written, outside

    def host_nbytes(self) -> int:
        """Bytes of the arrays: what grows with the program."""
        arrays = (
            self.calls, self.ambient, self.seconds, self.saves, self.save_ends, self.packs, self.given, self.looks,
            self.inner_nbytes, self.transient_nbytes, self.reverse_nbytes, self.taken_nbytes, self.outcomes,
            self.arguments, self.argument_ends, self.results, self.result_ends, self.birth, self.last_use, self.death,
            self.cotangent_nbytes, self.storage, self.storage_nbytes, self.storage_external,
        )  # fmt: skip
        return sum(a.itemsize * len(a) for a in arrays)
