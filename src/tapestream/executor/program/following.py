"""`Following`: operations that are those of the last call are noted by what was noted then, in less time.

What PyTorch's own functions give and save depends on nothing but the shapes, strides and needs of what they are given,
and on what surrounds them. So a call that is given the same, of the values and external tensors with the same numbers,
need not be looked at closely, and its note is copied from that of the last call, many at once (`flush`) before anybody
reads it. Whatever is not quite as it was is noted as if nothing were known; where what it leaves differs from then,
nothing after it is followed.
"""

import weakref
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from tapestream.executor.program.last import BY_OPERATION, Last, Step
from tapestream.executor.program.record import ALIVE, looks_of
from tapestream.executor.program.tape import handle

if TYPE_CHECKING:
    from tapestream.executor.program.noting import Noting

UNKNOWN: Final = object()
"""In place of a result: the call was not made, and is to be noted closely."""


class Following:
    """One sweep that follows ``last``, as long as it can: operation ``k`` is the next, and those from ``noted`` on are
    not in the record yet.

    By value, a weak reference and the version it had last; by external tensor, itself and its version.
    """

    def __init__(self, noting: "Noting", last: Last) -> None:
        self.last, self.noting = last, noting
        self.k = self.noted = 0
        self._values = list[weakref.ref[torch.Tensor]]()
        self._versions = list[int]()
        self._outside = list[torch.Tensor]()
        self._outside_versions = list[int]()
        self._made = set[int]()  # ids of values, of dead ones among them
        self._ambients = 0  # how many of the record's are known to be those of last time
        self._calls: dict[int, int] = {}  # numbers of patterns in this record, by those of last time

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Make a call that is the next one of last time, and note it; `UNKNOWN` where it is not."""
        k, noting, steps = self.k, self.noting, self.last.steps
        step = steps[k] if k < len(steps) else None
        if step is None or function is not step.pattern.function:
            return self._unknown()
        if k >= noting.quiet and not self._goes_on():
            return UNKNOWN
        tensors = self._tensors(step, args, kwargs)
        if tensors is None or noting.ambient() != step.ambient or not self._is_around():
            return self._unknown()
        if step.writes and not self._may_write(step):
            return self._unknown()
        noting.packs.first = handle(k, 0)
        noting.packs.listed = saved = list[torch.Tensor]()
        try:
            result = function(*args, **kwargs) if kwargs else function(*args)
        finally:
            noting.packs.listed = None
        made = (result,) if isinstance(result, torch.Tensor) else result
        if len(saved) != step.packs or not _is_as_then(step, made, tensors):
            self._closely((function, args, kwargs), step, result, saved)
            return result
        if saved:
            noting.packs.take(k, saved, self.last.record.given[k])
        if step.writes:
            self._has_written(step)
        if step.made:
            for tensor in made:
                self._add(tensor)
        self.k = k + 1
        return result

    def _tensors(self, step: Step, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
        """What a call is given, where it is the call of ``step`` on the very values and external tensors."""
        tensors = list[torch.Tensor]()
        if not step.pattern.is_of(args, kwargs, tensors) or len(tensors) != len(step.numbers):
            return None
        values, versions = self._values, self._versions
        outside, outside_versions = self._outside, self._outside_versions
        for number, tensor in zip(step.numbers, tensors, strict=True):
            if number >= 0:
                if values[number]() is not tensor or tensor._version != versions[number]:
                    return None
            elif ~number < len(outside):
                if outside[~number] is not tensor or tensor._version != outside_versions[~number]:
                    return None
            elif not self._is_outside(~number, tensor):
                return None
        return tensors

    def _is_outside(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` looks as external tensor ``number`` did, and nobody has seen it; it is one then."""
        last, numbers, record = self.last, self.noting.numbers, self.noting.record
        if number != len(self._outside) or len(record.externals) != number or id(tensor) in self._made:
            return False
        looks = looks_of((tensor,))
        if looks != last.looks[number] or numbers.of(tensor) is not None:
            return False
        if not numbers.from_outside(tensor, looks, self.k, last.outside[number], last.record.storage_nbytes):
            return False
        self._outside.append(tensor)
        self._outside_versions.append(tensor._version)
        return True

    def _is_around(self) -> bool:
        """Whether the ambients that are new are those of last time."""
        mine, theirs = self.noting.record.ambients, self.last.record.ambients
        while self._ambients < len(mine):
            if self._ambients >= len(theirs) or mine[self._ambients] != theirs[self._ambients]:
                return False
            self._ambients += 1
        return True

    def _goes_on(self) -> bool:
        """Something is to be done before operation ``k``; whether the plan goes on after that."""
        noting, k = self.noting, self.k
        self.flush()
        noting.next_nbytes = self.last.record.taken_nbytes[k]
        noting.between(k, noting.packs.nbytes)
        if k >= noting.quiet:
            noting.stop_following()
        return noting.following is not None

    def _may_write(self, step: Step) -> bool:
        """Before a call writes into tensors of others: what holds them gets copies."""
        noting = self.noting
        if noting.moves is not None:
            return False
        for storage in step.writes:
            noting.keeper.before_write(storage, noting.numbers.shown.get(storage, []))
        return True

    def _has_written(self, step: Step) -> None:
        for storage in step.writes:
            self.noting.record.write(storage, self.k)
        self.noting.record.arrays.written(step.writes)
        for number in step.numbers:
            if number < 0:
                self._outside_versions[~number] = self._outside[~number]._version

    def _add(self, tensor: torch.Tensor) -> None:
        """The next value."""
        noting, value = self.noting, len(self._values)
        if noting.holding and value in noting.holding:
            noting.hold([value], [tensor], self.last.record.storage)
        self._know(tensor)

    def _know(self, tensor: torch.Tensor) -> None:
        self._values.append(weakref.ref(tensor))
        self._versions.append(tensor._version)
        self._made.add(id(tensor))

    def _unknown(self) -> Any:
        self.flush()
        return UNKNOWN

    def _closely(self, call: tuple[Any, Any, Any], step: Step, result: Any, saved: list[torch.Tensor]) -> None:
        """A call was made that saves or gives something else than last time."""
        noting = self.noting
        self.flush()
        for tensor in saved:
            noting.packs.add(tensor)
        versions = [self._versions[n] if n >= 0 else self._outside_versions[~n] for n in step.numbers]
        seconds = self.last.record.seconds[self.k]
        noting.note_closely(call, list(step.numbers), versions, frozenset(step.writes), result, step.ambient, seconds)

    # -- the record -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Bring the record, and all that numbers tensors, up to where the program is."""
        first, k = self.noted, self.k
        if first == k:
            return
        self.noted = k
        last, record, numbers = self.last, self.noting.record, self.noting.numbers
        values = len(record.birth), last.values_before(k)
        numbers.know_storages(last.storages_before(k), last.record.storage_nbytes)
        saves = self._copy(first, k, *values)
        self.noting.packs.noted(saves, last.saved_nbytes[k])
        for value in range(*values):
            tensor = self._values[value]()
            if tensor is None:
                record.death.append(min(last.record.death[value], k))
            else:
                record.death.append(ALIVE)
                # Of then, not of now: something that no call showed may have written into it since.
                at, version = last.record.birth[value], self._versions[value]
                numbers.watch(tensor, value, last.record.storage[value], at, version)
        for operation in range(first, k):
            numbers.used(record.arguments_of(operation), operation)
        self.noting.noted(last.record.taken_nbytes[first:k])

    def _copy(self, first: int, k: int, value: int, end: int) -> "array[int]":
        """The notes on operations ``first`` .. ``k`` - 1, and on the values that they make; gives what they save."""
        record, theirs = self.noting.record, self.last.record
        record.calls.extend([self._call(operation) for operation in range(first, k)])
        for name in BY_OPERATION:
            getattr(record, name).extend(getattr(theirs, name)[first:k])
        for name, ends in (("arguments", "argument_ends"), ("results", "result_ends"), ("saves", "save_ends")):
            found = getattr(theirs, ends)
            part = getattr(theirs, name)[found[first - 1] if first else 0 : found[k - 1]]
            getattr(record, name).extend(part)
        for name in ("birth", "cotangent_nbytes", "storage"):
            getattr(record, name).extend(getattr(theirs, name)[value:end])
        record.last_use.extend(theirs.birth[value:end])
        saves: array[int] = part
        return saves

    def _call(self, operation: int) -> int:
        """The number of its pattern, in this record."""
        then = self.last.record.calls[operation]
        number = self._calls.get(then)
        if number is None:
            step = self.last.steps[operation]
            assert step is not None
            number = self._calls[then] = self.noting.record.patterns.adopted(step.pattern)
        return number

    def heed(self, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Operation ``k`` was noted closely, on ``tensors``: go on where what it has left is as it was last time."""
        k, record = self.k, self.noting.record
        self.k = self.noted = k + 1
        if not self._is_in_step(k):
            self.noting.stop_following()
            return
        for number, tensor in zip((*record.arguments_of(k), *record.results_of(k)), (*tensors, *made), strict=True):
            if number < 0:
                self._outside_versions[~number] = tensor._version
            elif number < len(self._values):
                self._versions[number] = tensor._version
            else:
                self._know(tensor)

    def _is_in_step(self, k: int) -> bool:
        last, record, noting = self.last, self.noting.record, self.noting
        theirs = last.record
        if k >= len(last.steps) or record.switched or noting.exposed:
            return False
        if noting.packs.nbytes != last.saved_nbytes[k + 1] or record.outcomes[k] != theirs.outcomes[k]:
            return False
        ends = ("argument_ends", "result_ends", "save_ends")
        if any(getattr(record, name)[k] != getattr(theirs, name)[k] for name in ends):
            return False
        if record.results_of(k) != theirs.results_of(k) or record.arguments_of(k) != theirs.arguments_of(k):
            return False
        if len(record.storage_nbytes) != last.storages_before(k + 1):
            return False
        for value in range(len(self._values), len(record.birth)):
            storage = record.storage[value]
            if storage != theirs.storage[value] or record.storage_nbytes[storage] != theirs.storage_nbytes[storage]:
                return False
        for external in record.externals[len(self._outside) :]:
            number = len(self._outside)
            if (external.looks, external.storage) != (last.looks[number], last.outside[number]):
                return False
            self._outside.append(external.tensor)
            self._outside_versions.append(external.tensor._version)
        return True


def _is_as_then(step: Step, made: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the results of a call are as many plain tensors as last time, all new, or its first argument."""
    if not step.made:
        return made[0] is tensors[0]
    if step.made == 1 == len(made):
        return type(made[0]) is torch.Tensor
    return len(made) == step.made and all(type(tensor) is torch.Tensor for tensor in made)
