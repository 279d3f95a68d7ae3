"""`Noting`: takes note of one call after the other in a record, and of what it does to what is kept."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from tapestream.accelerator.device import in_use
from tapestream.errors import GradientError
from tapestream.executor.program.calls.exposed import Exposed
from tapestream.executor.program.calls.hidden import Hidden
from tapestream.executor.program.calls.patterns import Call, Measured, tensors_of
from tapestream.executor.program.calls.seams import FROM_DLPACK
from tapestream.executor.program.calls.values import is_parameter
from tapestream.executor.program.calls.writes import check_changed
from tapestream.executor.program.noting.along import Along
from tapestream.executor.program.noting.following import Following
from tapestream.executor.program.noting.generators import Draws
from tapestream.executor.program.noting.numbering import Numbering
from tapestream.executor.program.noting.outsiders import Places
from tapestream.executor.program.noting.packs import Packs
from tapestream.executor.program.noting.trials import Spare, Trials, expected
from tapestream.executor.program.record.ambients import Ambients
from tapestream.executor.program.record.keeper import Keeper, foreign
from tapestream.executor.program.record.last import Last, last_of
from tapestream.executor.program.record.record import Record, looks_of
from tapestream.executor.program.record.settled import sets_alone
from tapestream.executor.program.record.tape import Tape
from tapestream.executor.program.replay.moves import Moves
from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.counts import digest_of

Operation = Callable[[int, int], None]
_NONE = frozenset[int]()


def _always(nbytes: int, *, anyway: bool) -> bool:
    return True


class Given(NamedTuple):
    """A call, its tensors with their numbers and versions, and the storages that it says it will write into."""

    function: Any
    call: Call
    tensors: list[torch.Tensor]
    numbers: list[int]
    versions: list[int]
    announced: Set[int]


class Noting:
    """``between`` is called before each operation from ``quiet`` on, with its number and the bytes saved for
    backward so far: the time to make a restart checkpoint, and to say whether saved tensors are to be kept from here on
    (see `Packs`).

    ``next_nbytes``: what the next operation is to take, with what it makes and saves, as far as that can be known.
    ``spare``: see `Spare`. ``holding``: values that are to be kept with the restart checkpoint before an earlier
    operation, which is there, by their number. ``moves``: what goes below the device meanwhile. ``following``: of a
    call before, None where all is looked at closely; ``along``: the course as long as nothing is noted,
    which is ``departed`` from then.
    """

    spare: Spare = staticmethod(_always)

    def __init__(
        self, record: Record, keeper: Keeper, tape: Tape, between: Operation, along: Along | None = None
    ) -> None:
        super().__init__()
        self.record, self.keeper, self.tape, self.between, self.along = record, keeper, tape, between, along
        self.departed: Along | None = None
        self.following: Following | None = None
        self.epoch = 0
        self._hidden: Hidden | None = None
        if along is None:
            self._begin()

    def _begin(self) -> None:
        """The first operation that is noted is to come."""
        record, keeper, tape = self.record, self.keeper, self.tape
        keeper.begin()
        self.holding: Mapping[int, int] = {}
        self.moves: Moves | None = None
        self.quiet = self.next_nbytes = self._largest_nbytes = 0
        self.numbers = Numbering(record, keeper, departed=self.departed is not None)
        self.packs = Packs(record, self.numbers, tape, keeper.hold)
        self.following = None
        self._bypassed = dict[int, list[torch.Tensor]]()  # by storage that .data shows, what requires a gradient there
        self._exposed = Exposed(self.numbers.storage_of)
        self._trials = Trials(keeper.device)
        kinds = {"cpu": 0, keeper.device.type: 0, **({} if (started := in_use()) is None else {started.type: 0})}
        self.ambients, self._draws = Ambients(record.ambients, tuple(kinds)), Draws(record)

    @property
    def exposed(self) -> bool:
        """Whether others have been shown memory of tensors."""
        return bool(self._exposed.sums)

    def ambient(self) -> int:
        """The number of what surrounds an operation now."""
        return self.ambients.now(self.epoch)

    def follow(self, last: Last | None, places: Callable[[], Places] = dict) -> None:
        """Expect the operations of ``last`` time, if that is known. ``places`` of tensors that it may be given."""
        self.following = self.numbers.following = None if last is None else Following(self, last, places)

    def stop_following(self) -> None:
        """Look at all operations from here on."""
        if self.following is not None:
            self.following = self.numbers.following = None

    def flush(self) -> None:
        """Have all in the record that has been done so far."""
        if self.following is not None:
            self.following.flush()

    def look_again(self) -> None:
        """Have all in the record: what comes may do what no call has shown so far."""
        if self.following is not None:
            self.following.look_again()

    def alive(self, wanted: Set[int]) -> Mapping[int, tuple[torch.Tensor, int]]:
        """See `Numbering.alive`: the values ``wanted``, and others perhaps."""
        return self.numbers.alive() if self.following is None else self.following.alive(wanted)

    def noted(self, taken_nbytes: Sequence[int]) -> None:
        """Operations have taken so much."""
        self._largest_nbytes = max(self._largest_nbytes, *taken_nbytes)

    def followed(self) -> Last | None:
        """What the sweep, which has ended, has followed all along."""
        following, record = self.following, self.record
        if following is None or not following.k == len(record) == len(following.last.record):
            return None
        return following.last if len(record.externals) == len(following.last.outside) else None

    def as_last(self) -> Last | None:
        """What the next sweep can follow."""
        return self.followed() or (None if self.exposed or self.record.handed_over else last_of(self.record))

    def _heard(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of which the inside is to be seen, where anybody listens."""
        return function(*args, **kwargs)

    def _noted(self, func: Any, args: Any, kwargs: dict[str, Any], always: bool) -> Any:
        record, k = self.record, len(self.record.calls)
        tensors: list[torch.Tensor] = []
        call = record.patterns.of(func, args, kwargs, tensors)
        measured = call.measured
        if k >= self.quiet:
            self._before(k, measured, tensors)
        ambient = self.ambient()
        numbers = self.numbers.given(tensors, k)
        if self.exposed:
            record.spoilt = record.spoilt or self._exposed.why_spoilt(tensors)
        announced = self._announce([tensors[i] for i in call.into]) if call.into else _NONE
        versions = [t._version for t in tensors]
        self.numbers.made_nbytes = 0
        self.packs.begin(k)  # a call before it may have failed
        if self._hidden is not None:
            self._hidden.shown = call.shown
        drawing = self._draws.before(call)
        start = time.perf_counter()
        call_it = func if self._hidden is None else functools.partial(self._heard, func)
        if measured.transient_nbytes is None:
            result = self._trials.run(measured, functools.partial(call_it, *args, **kwargs))
        else:
            result = call_it(*args, **kwargs)
        seconds = time.perf_counter() - start
        given = Given(func, call, tensors, numbers, versions, announced)
        self._note(given, result, ambient, seconds, drawing, always)
        return result

    def note_closely(
        self, made: tuple[Any, Any, Any], numbers: list[int], versions: list[int], announced: Set[int], result: Any,
        ambient: int, seconds: float,
    ) -> None:  # fmt: skip
        """Note a call that was made as one that is known, and turns out not to be. ``made``: the function and what it
        was given."""
        tensors: list[torch.Tensor] = []
        func, args, kwargs = made
        call = self.record.patterns.of(func, args, kwargs or {}, tensors)
        self._note(Given(func, call, tensors, numbers, versions, announced), result, ambient, seconds, None, False)

    def _note(
        self, given: Given, result: Any, ambient: int, seconds: float, drawing: TorchGenerators | None, always: bool
    ) -> None:
        record, k, (func, call, tensors, numbers, versions, announced) = self.record, len(self.record.calls), given
        # Running statistics are written into without a new version.
        touched = versions != [t._version for t in tensors] or call.needs != [t.requires_grad for t in tensors]
        changed = self._changed(tensors, versions, announced) if touched else announced
        made = [result] if type(result) is torch.Tensor else tensors_of(result, [])
        # A gradient is not made here: external where it is used.
        fresh = [] if call.attribute == "grad" else [t for t in made if self.numbers.of(t) is None]
        noted = bool(fresh or touched or changed or always)
        drawn = drawing is not None and self._draws.after(drawing, call)
        if not (drawn or noted):
            record.asking.add(func)
            self.packs.begin(k)
            return
        if touched:
            values = [number >= 0 for number in numbers]
            self._spoil(func, tensors, list(zip(versions, call.needs, strict=True)), announced, values)
        if changed or call.attribute == "data":
            self._heed_writes(k, call, tensors, changed)
        if drawn:
            record.drawn.append(k)
        number = None if call.pattern.foreign else call.number
        record.calls.append(record.patterns.number(call, fresh) if number is None else number)
        record.ambient.append(ambient)
        record.seconds.append(seconds)
        record.arguments.extend(numbers)
        record.argument_ends.append(len(record.arguments))
        self.numbers.used(numbers, k)
        one = len(made) == 1 == len(fresh)
        results = [self.numbers.new(made[0], k)] if one else [self.numbers.made(t, k) for t in made]
        self.hold(results, made, record.storage)
        record.results.extend(results)
        record.result_ends.append(len(record.results))
        record.outcomes.append(looks_of([*made, *tensors] if touched else made))
        if record.digests is not None:
            record.digests.append(digest_of(made))
        self._end(k, func, call, tensors, fresh)
        taken = self._trials.note(
            record, self.numbers, call.measured, tensors, call.needs, announced, fresh, self.spare
        )
        self._largest_nbytes = max(self._largest_nbytes, taken)
        if self.following is not None:
            self.following.heed(tensors, made)

    def _before(self, k: int, measured: Measured, tensors: list[torch.Tensor]) -> None:
        self.next_nbytes = expected(measured, tensors, self._largest_nbytes)
        self.between(k, self.packs.nbytes)

    def hold(self, results: Sequence[int], made: Sequence[torch.Tensor], storage: Sequence[int]) -> None:
        """An operation has made these values, in these storages (by value), of which some belong to restart
        checkpoints that are there."""
        for number, tensor in zip(results, made, strict=True) if self.holding else ():
            operation = self.holding.get(number)
            if operation is not None:
                self.keeper.add(operation, number, tensor, storage[number])

    def _end(self, k: int, func: Any, call: Call, tensors: list[torch.Tensor], fresh: list[torch.Tensor]) -> None:
        """Others may write into arrays that an operation has saved, or has made a tensor over, or imported."""
        self.packs.end(k)
        if call.pattern.foreign and self._hidden is None:
            self.record.hidden[k] = Hidden(call.shown)
        if not call.buffers and func is not FROM_DLPACK:
            return
        self.record.arrays.met = True
        if self.record.packs[k]:
            self.record.arrays.given(call.buffers)
        for tensor in tensors if func is FROM_DLPACK else ():
            self._exposed.note(tensor)
        for tensor in fresh:
            if foreign(tensor):
                self._exposed.note(tensor)
                self.record.arrays.shown(self.numbers.storage_of(tensor), tensor)

    def _announce(self, into: Sequence[torch.Tensor]) -> Set[int]:
        """The storages that a call says it will write into; what holds them gets copies."""
        of, storage_of = self.numbers.of, self.numbers.storage_of
        announced = {storage_of(t) for t in into if of(t) is not None}
        if self.moves is not None:
            self.moves.written(into)
        for storage in announced:
            externals = self.numbers.shown.get(storage, [])
            if not (externals and self._sets(storage, externals)):
                self.keeper.before_write(storage, externals)
        return announced

    def _sets(self, storage: int, externals: Sequence[tuple[int, torch.Tensor]]) -> bool:
        """Whether a leaf is written into that nothing has read: it is used as it will be in the end."""
        record = self.record
        if storage in record.uncopied:
            return True
        if storage in record.writes or not all(is_parameter(tensor) for _, tensor in externals):
            return False
        first = min(record.externals[~number].first_use for number, _ in externals)
        if sets_alone(record, storage, first):
            record.uncopied.add(storage)
        return storage in record.uncopied

    def _spoil(
        self, func: Any, tensors: list[torch.Tensor], before: list[tuple[int, bool]], announced: Set[int],
        values: Sequence[bool],
    ) -> None:  # fmt: skip
        """What was written into without a word, or has a need of a gradient that it had not before."""
        of, external = self.numbers.storage_of, self.record.storage_external
        own = self.record.departed
        for storage in check_changed(func, tensors, before, of, external, announced, own=own, values=values):
            self.keeper.spoilt(storage)
            if self.moves is not None:
                self.moves.written([t for t in tensors if of(t) == storage])

    def _changed(self, tensors: list[torch.Tensor], versions: list[int], announced: Set[int]) -> Set[int]:
        changed = (t for t, version in zip(tensors, versions, strict=True) if t._version != version)
        return announced | {self.numbers.storage_of(t) for t in changed}

    def _heed_writes(self, k: int, call: Call, tensors: list[torch.Tensor], changed: Set[int]) -> None:
        for storage in changed:
            self.record.write(storage, k)
        self.numbers.gained(k, [t for t in tensors if self.numbers.storage_of(t) in changed])
        self.record.arrays.written(changed)
        if self._exposed.sums:
            self._exposed.note_written(tensors, changed)
        for tensor in tensors:
            if is_parameter(tensor) and self.numbers.storage_of(tensor) in changed:
                self.record.leaves_written.append((k, self.numbers.given((tensor,), k)[0]))
        if changed & self._bypassed.keys():
            self._write_unseen(k, changed)
        if call.attribute == "data" and tensors[0].requires_grad:
            self._bypassed.setdefault(self.numbers.storage_of(tensors[0]), []).append(tensors[0])

    def _write_unseen(self, k: int, changed: Set[int]) -> None:
        """Operation ``k`` writes into tensors that require a gradient through their .data."""
        for storage in changed & self._bypassed.keys():
            if not (self.record.storage_external[storage] and all(map(is_parameter, self._bypassed[storage]))):
                raise GradientError(
                    "Program: a tensor that requires a gradient was written into through its .data, which autograd "
                    "does not see; write into it under torch.no_grad(), or into a clone()"
                )
            self.record.unseen_writes.append((k, storage))
