"""`Following`: operations that are those of the last call are noted by what was noted then, in less time.

What PyTorch's own functions give and save depends on nothing but the shapes, strides and needs of what they are given,
and on what surrounds them. So a call that is given the same, of the values and external tensors with the same numbers,
need not be looked at closely, and its note is copied from that of the last call, many at once (`flush`) before anybody
reads it. Whatever is not quite as it was is noted as if nothing were known; where what it leaves differs from then,
nothing after it is followed.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch

from tapestream.executor.program.calls.templates import PLAIN
from tapestream.executor.program.noting.outsiders import Outsiders, Places
from tapestream.executor.program.record.last import BY_OPERATION, Last
from tapestream.executor.program.record.record import ALIVE
from tapestream.executor.program.record.step import CONSTANT, MADE, OUTSIDE, Step
from tapestream.executor.program.record.tape import PLACES

if TYPE_CHECKING:
    from tapestream.executor.program.noting.noting import Noting

UNKNOWN: Final = object()
"""In place of a result: the call was not made, and is to be noted closely."""


class Following:
    """One sweep that follows ``last``, as long as it can: operation ``k`` is the next, and those from ``noted`` on are
    not in the record yet. By value, a weak reference and the version it had last."""

    def __init__(self, noting: "Noting", last: Last, places: Callable[[], Places]) -> None:
        self.last, self.noting = last, noting
        self.k = self.noted = 0
        self._steps = last.steps
        self._values, self._versions, self._ids = list[ref[torch.Tensor]](), list[int](), list[int]()
        self._outsiders = Outsiders(last, noting.record, noting.numbers, self._ids, places)
        self._externals, self._packs = noting.record.externals, noting.packs
        self._living, self._deaths = list[int](), dict[int, int]()  # of values that are not in the record yet
        self._looked = self._buried = 0  # at so many values; before an earlier operation than this one
        self._ambients = 0  # how many of the record's are known to be those of last time
        self._calls: dict[int, int] = {}  # numbers of patterns in this record, by those of last time

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Make a call that is the next one of last time, and note it; `UNKNOWN` where it is not."""
        k, noting = self.k, self.noting
        step = self._steps[k]
        if step is None or function is not step.function:
            return UNKNOWN
        if len(self._externals) > len(self._outsiders.tensors) and not self._outsiders.agree():
            noting.stop_following()  # calls that make nothing (`tolist()`) have shown others
            return UNKNOWN
        if k >= noting.quiet and not self._goes_on():
            return UNKNOWN
        if not (self._is_given(step, args, kwargs) and self._is_around(step)):
            return UNKNOWN
        if step.writes and not self._may_write(step):
            return UNKNOWN
        packs = self._packs
        saved: list[torch.Tensor] = []
        if packs.count:
            packs.begin(k)  # a call before it has failed
        packs.first, packs.listed = k * PLACES, saved
        try:
            result = function(*args, **kwargs) if kwargs else function(*args)
        finally:
            packs.listed = None
        made = (result,) if isinstance(result, torch.Tensor) else result
        if len(saved) != step.packs or not self._is_as_then(step, made):
            self._closely((function, args, kwargs), step, result, saved)
            return result
        if saved and (packs.taking or packs.holding):
            packs.take(k, saved, self.last.record.given[k])
        if step.writes:
            self._has_written(step)
        if step.made:
            for tensor in made:
                if noting.holding:
                    self._hold(tensor)
                self._know(tensor)
        self.k = k + 1
        return result

    def _is_given(self, step: Step, args: Any, kwargs: Any) -> bool:
        """Whether a call is that of ``step``, on the very values and external tensors."""
        if kwargs or step.names:
            if tuple(kwargs or ()) != step.names:
                return False
            args = (*args, *kwargs.values())
        if len(args) != len(step.expected):
            return False
        same, outsiders = True, self._outsiders
        for kind, expected, given in zip(step.kinds, step.expected, args):  # noqa: B905 - they are as many
            if kind == CONSTANT:
                if given is not expected:
                    same = False
            elif kind == MADE:
                if given is None or self._values[expected]() is not given or self._versions[expected] != given._version:
                    return False
            elif kind == OUTSIDE:
                if expected >= len(outsiders.tensors):
                    if not outsiders.takes(expected, given):
                        return False
                elif outsiders.tensors[expected] is not given or outsiders.versions[expected] != given._version:
                    return False
            else:
                tensors = expected.tensors_of(given)
                if tensors is None or not all(self._is(number, tensor) for number, tensor in tensors):
                    return False
        return same or step.agrees(args)

    def _is(self, number: int, given: Any) -> bool:
        """Whether ``given`` is the tensor with this number, as it was used last."""
        outsiders = self._outsiders
        if number >= 0:
            tensor, version = self._values[number](), self._versions[number]
        elif ~number < len(outsiders.tensors):
            tensor, version = outsiders.tensors[~number], outsiders.versions[~number]
        else:
            return outsiders.takes(~number, given)
        return tensor is not None and tensor is given and tensor._version == version

    def _is_around(self, step: Step) -> bool:
        """Whether what surrounds a call is what did last time."""
        ambients, epoch = self.noting.ambients, self.noting.epoch
        if step.attends or not ambients.hold(epoch, step.multiplies):
            ambients.now(epoch)
            ambients.guard(epoch)
        if ambients.number != step.ambient:
            return False
        mine = self.noting.record.ambients
        if self._ambients < len(mine):
            theirs, since = self.last.record.ambients, self._ambients
            if mine[since:] != theirs[since : len(mine)]:
                return False
            self._ambients = len(mine)
        return True

    def _goes_on(self) -> bool:
        """Something is to be done before operation ``k``; whether the plan goes on after that."""
        noting, k = self.noting, self.k
        if noting.moves is None:
            self._bury()
        else:
            self.flush()
        noting.next_nbytes = self.last.record.taken_nbytes[k]
        noting.packs.nbytes = self.last.saved_nbytes[k]
        noting.between(k, noting.packs.nbytes)
        if k >= noting.quiet:
            self.flush()
            noting.stop_following()
        return noting.following is not None

    def alive(self, wanted: Iterable[int]) -> dict[int, tuple[torch.Tensor, int]]:
        """See `Numbering.alive`: of the values ``wanted``."""
        values, storage = self._values, self.last.record.storage
        known = ((number, values[number]()) for number in wanted if 0 <= number < len(values))
        return {number: (tensor, storage[number]) for number, tensor in known if tensor is not None}

    def _may_write(self, step: Step) -> bool:
        """Before a call writes into tensors of others: what holds them gets copies."""
        noting = self.noting
        if noting.moves is not None:
            return False
        for storage in step.writes:
            noting.keeper.before_write(storage, *self._outsiders.written(storage))
        return True

    def _has_written(self, step: Step) -> None:
        for storage in step.writes:
            self.noting.record.write(storage, self.k)
        self.noting.record.arrays.written(step.writes)
        outsiders = self._outsiders
        for number in step.numbers:
            if number < 0:
                outsiders.versions[~number] = outsiders.tensors[~number]._version

    def _is_as_then(self, step: Step, made: Any) -> bool:
        """Whether the results of a call are as many plain tensors as last time, all new, or its first argument."""
        if step.made == 1:
            return len(made) == 1 and type(made[0]) is torch.Tensor
        if step.made:
            return len(made) == step.made and all(type(tensor) is torch.Tensor for tensor in made)
        first = step.numbers[0]
        return made[0] is (self._values[first]() if first >= 0 else self._outsiders.tensors[~first])

    def _hold(self, tensor: torch.Tensor) -> None:
        """The next value belongs to a restart checkpoint, perhaps."""
        value = len(self._values)
        if value in self.noting.holding:
            self.noting.hold([value], [tensor], self.last.record.storage)

    def _know(self, tensor: torch.Tensor) -> None:
        """The next value."""
        self._values.append(ref(tensor))
        self._versions.append(tensor._version)
        self._ids.append(id(tensor))

    def _closely(self, call: tuple[Any, Any, Any], step: Step, result: Any, saved: list[torch.Tensor]) -> None:
        """A call was made that saves or gives something else than last time."""
        noting = self.noting
        self.flush()
        for tensor in saved:
            noting.packs.add(tensor)
        versions = [self._versions[n] if n >= 0 else self._outsiders.versions[~n] for n in step.numbers]
        seconds = self.last.record.seconds[self.k]
        noting.note_closely(call, list(step.numbers), versions, frozenset(step.writes), result, step.ambient, seconds)

    # -- the record -----------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """See `Noting.look_again`."""
        self.flush()
        self._outsiders.look_again()

    def flush(self) -> None:
        """Bring the record, and all that numbers tensors, up to where the program is."""
        first, k = self.noted, self.k
        self._outsiders.note()
        if first == k:
            return
        self.noted = k
        last, record, numbers = self.last, self.noting.record, self.noting.numbers
        values = len(record.birth), last.values_before(k)
        numbers.know_storages(last.storages_before(k), last.record.storage_nbytes)
        saves = self._copy(first, k, *values)
        self.noting.packs.noted(saves, last.saved_nbytes[k])
        self._bury()
        for value in range(*values):
            tensor = self._values[value]()
            record.death.append(self._deaths.pop(value, k if tensor is None else ALIVE))
            if tensor is not None:
                # Of then, not of now: something that no call showed may have written into it since.
                at, version = last.record.birth[value], self._versions[value]
                numbers.watch(tensor, value, last.record.storage[value], at, version)
        self._living.clear()
        self._use(first, k)
        self.noting.noted(last.record.taken_nbytes[first:k])

    def _bury(self) -> None:
        """Which values that are not in the record yet the program has let go of, and when: as last time, as far as that
        can be."""
        k, theirs, living = self.k, self.last.record.death, list[int]()
        for value in (*self._living, *range(self._looked, len(self._values))):
            if self._values[value]() is None:
                self._deaths[value] = min(k, max(self._buried, theirs[value]))
            else:
                living.append(value)
        self._living, self._looked, self._buried = living, len(self._values), k + 1

    def _use(self, first: int, k: int) -> None:
        """The operations ``first`` .. ``k`` - 1 have used what they were given."""
        record, numbers, outside = self.noting.record, self.noting.numbers, self.last.outside
        if k + 1 < len(self._steps) or len(record.externals) != len(outside):
            for operation in range(first, k):
                numbers.used(record.arguments_of(operation), operation)
            return
        record.last_use = self.last.record.last_use[:]
        for external, then in zip(record.externals, outside, strict=True):
            external.last_use = then.last_use

    def _copy(self, first: int, k: int, value: int, end: int) -> "array[int]":
        """The notes on operations ``first`` .. ``k`` - 1, and on the values that they make; gives what they save."""
        record, theirs = self.noting.record, self.last.record
        calls = theirs.calls[first:k]
        for operation, then in enumerate(calls, first):
            if then not in self._calls:
                self._calls[then] = self._adopted(operation)
        record.calls.extend(map(self._calls.__getitem__, calls))
        for name in BY_OPERATION:
            getattr(record, name).extend(getattr(theirs, name)[first:k])
        for name, ends in (("arguments", "argument_ends"), ("results", "result_ends"), ("saves", "save_ends")):
            found = getattr(theirs, ends)
            part = getattr(theirs, name)[found[first - 1] if first else 0 : found[k - 1]]
            getattr(record, name).extend(part)
        for name in ("birth", "cotangent_nbytes", "storage"):
            getattr(record, name).extend(getattr(theirs, name)[value:end])
        record.last_use.extend(theirs.birth[value:end])
        record.gained.update((one, at) for one, at in theirs.gained.items() if value <= one < end)
        saves: array[int] = part
        return saves

    def _adopted(self, operation: int) -> int:
        """The number of its pattern, which is new to this record."""
        step = self.last.steps[operation]
        assert step is not None
        return self.noting.record.patterns.adopted(step.pattern)

    def heed(self, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Operation ``k`` was noted closely, on ``tensors``: go on where what it has left is as it was last time."""
        k, record = self.k, self.noting.record
        self.k = self.noted = k + 1
        if not (self._is_in_step(k) and all(type(tensor) in PLAIN for tensor in made)):
            self.noting.stop_following()
            return
        for number, tensor in zip((*record.arguments_of(k), *record.results_of(k)), (*tensors, *made), strict=True):
            if number < 0:
                self._outsiders.versions[~number] = tensor._version
            elif number < len(self._values):
                self._versions[number] = tensor._version
            else:
                self._know(tensor)
        self._looked = len(self._values)

    def _is_in_step(self, k: int) -> bool:
        last, record, noting = self.last, self.noting.record, self.noting
        theirs = last.record
        if k + 1 >= len(last.steps) or record.switched or noting.exposed:
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
        return self._outsiders.agree()
