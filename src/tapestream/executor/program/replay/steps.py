"""`ProgramSteps`: runs stretches of a recorded program again, from the values alive at their beginning.

A stretch is recorded by running it as a graph of its own of which nothing but what it saves is kept: backward goes
through the graph of the program's own run, and asks for that (see `Tape`).
"""

import contextlib
import functools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tapestream.errors import GradientError, ScheduleError, TapestreamError
from tapestream.executor.program.calls.patterns import Pattern, tensors_of
from tapestream.executor.program.calls.writes import SWITCHES
from tapestream.executor.program.record.ambients import surroundings
from tapestream.executor.program.record.keeper import Entry, Kept
from tapestream.executor.program.record.lessons import Lessons
from tapestream.executor.program.record.record import Record, look
from tapestream.executor.program.record.tape import Saved, inside, still
from tapestream.executor.program.replay.differing import as_before, changed, name_of
from tapestream.executor.program.replay.moves import Moves
from tapestream.executor.program.replay.needed import RUN, SAVE, SKIP, Needed
from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.graph import root_of_graph
from tapestream.runner.guards import Guard

NAME = "the program"
_TOGETHER = 256
"""Operations that are run again at once, most: their graph holds no tensors, but its nodes take host memory."""


class ProgramSteps:
    """See `Segments`; a state is what a restart checkpoint holds. ``cuts``: the operations before which stretches
    begin, and the end. ``saved``: see `Tape`.

    ``stages`` and ``operations`` count those run again; ``draws``: they may draw random numbers. ``lessons`` of earlier
    calls that have made the same operations. ``moves``: what moves below the device, if anything does.
    """

    def __init__(
        self,
        record: Record,
        cuts: Sequence[int],
        device: torch.device,
        saved: dict[int, Saved],
        lessons: Lessons | None = None,
        moves: Moves | None = None,
    ) -> None:
        self.program, self.cuts, self.device, self.saved = record, cuts, device, saved
        self.stages = self.operations = 0
        self._lessons, self.moves = lessons, moves
        self._opaque = sorted(record.hidden)
        self._most = -1  # after so many saved tensors an operation need not go on
        self.of_users = record.of_users()
        self.users_code = bool(self.of_users)
        self.draws = record.draws_nbytes > 0 or self.users_code
        casts = any(to is not None for ambient in record.ambients for _, to in ambient.casts)
        switches = any(one.function in SWITCHES for one in record.patterns.all)
        self._tells_leaves = self.users_code or casts or switches
        self._running: Saved | None = None  # what an operation of users' code has saved so far
        self._own = frozenset[int]()  # what is live in memory that no restart checkpoint holds
        self._root = root_of_graph()
        self._first: TorchGenerators | None = None

    @functools.cached_property
    def _needed(self) -> Needed:
        return Needed(self.program)  # of no use where nothing runs again

    @functools.cached_property
    def _showing(self) -> dict[int, list[int]]:
        return self.program.showing_written()

    def forward(self, live: list[Kept], start: int, stop: int) -> Kept:
        """Run stretches, keeping nothing: the state before stretch ``stop``."""
        while start < stop:
            end = start + 1
            while end < stop and self._go_together(start, end + 1):
                end += 1
            state = self._run(live, start, end, None)
            assert state is not None
            live, start = [state], end
            del state
        return live.pop()

    def record(self, live: list[Kept], stage: int, *, output_needed: bool) -> tuple[Kept | None, None]:
        """Run a stretch; what it saves is kept, in ``saved``. If the state after it is not needed, only that is
        computed which is needed for what it saves (see `Needed`)."""
        moves = self.moves if self.moves is not None and stage in self.moves.reads else None
        if moves is not None:
            moves.border(stage, live[0].tensors)
        state = self._run(live, stage, stage + 1, [], go_on=output_needed)
        if moves is not None:
            moves.border(stage + 1, [] if state is None else state.tensors)
        return state, None

    def backward(self, tape: None, stage: int, cotangent: None) -> None:
        """The graph of the program's own run does that."""
        raise ScheduleError(f"autograd itself runs the backward of stage {stage}")

    def _go_together(self, start: int, stop: int) -> bool:
        """What enters and leaves a stretch takes longer than a few small operations. Opaque ones may hold tensors in
        their nodes, which go at the end of a stretch."""
        first, end = self.cuts[start], self.cuts[stop]
        return end - first <= _TOGETHER and bisect_left(self._opaque, first) == bisect_left(self._opaque, end)

    def forget(self, stage: int) -> None:
        """Drop what is left of what a stretch has saved."""
        for operation in range(self.cuts[stage], self.cuts[stage + 1]):
            self.saved.pop(operation, None)

    def keep(self, state: Kept, stage: int) -> Kept:
        """The live state as a restart checkpoint."""
        self._own = frozenset()
        return Kept(state.operation, state.entries, self._generators())

    def _generators(self) -> TorchGenerators | None:
        return self.program.generators() if self.program.draws_nbytes else self._first

    def restore(self, kept: Kept, stage: int, *, last: bool) -> Kept:
        """The live state of a restart checkpoint."""
        kept.check()
        if self.draws:
            assert kept.generators is not None
            self.program.restore(kept.generators)
        self._own, self._first = frozenset(), kept.generators
        return Kept(kept.operation, kept.entries, saves=kept.saves)

    def _todo(self, first: int, end: int, live: Kept) -> bytearray:
        """What to do with operations after which the program does not go on."""
        there, saves = live.entries.keys(), live.saves.keys()
        if self._lessons is None:
            return self._needed.of(first, end, there, saves)
        return self._lessons.needed((first, end), there, saves, lambda: self._needed.of(first, end, there, saves))

    # -- stretches that are run at once ---------------------------------------------------------------------------

    def _run(self, given: list[Kept], start: int, stop: int, into: Saved | None, *, go_on: bool = True) -> Kept | None:
        """From the only state in ``given``. Without saved tensors where ``into`` is None, without the state afterwards
        where not ``go_on``."""
        record, first, end = self.program, self.cuts[start], self.cuts[stop]
        live = given.pop()
        todo, self._most = None if go_on else self._todo(first, end, live), -1

        def pack(tensor: torch.Tensor) -> int:
            if into is not None:
                into.append((tensor.detach(), tensor._version))
                if len(into) == self._most:
                    raise _Enough
            if self._running is None:
                return 0
            self._running.append((tensor.detach(), tensor._version))
            return len(self._running)

        values, left = self._entered(live, first, end)
        own = {} if go_on else live.saves
        del live  # what is used up on the way goes on the way
        with surroundings(record.ambients) as enter, saved_tensors_hooks(pack, self._unpack):
            self._replay(values, first, end, enter, into, todo, own)
        self.stages += stop - start
        if not go_on:
            return None
        self._own = self._own & left.keys() | values.keys()
        for number, tensor in values.items():
            storage = record.storage_of(number)
            private = not record.storage_external[storage] or storage in record.writes
            left[number] = Entry.of(tensor, storage, private=private)
        return Kept(end, left)

    def _entered(self, state: Kept, first: int, end: int) -> tuple[dict[int, torch.Tensor], dict[int, Entry]]:
        """What the operations ``first`` .. ``end`` - 1 use of the state, each as a tensor of its own that they may
        write into; and the rest as it is."""
        record, entries = self.program, state.entries
        used = record.used_between(first, end) & entries.keys()
        for number in tuple(used):
            storage = entries[number].storage
            if record.written_since(storage, first):  # what shows it is copied together
                used.update(n for n in self._sharing(storage, entries) if n in entries)
        shared = Kept(state.operation, {n: entries[n] for n in used if n not in self._own}).unshared(record)
        with torch.enable_grad():
            values = {n: self._entering(shared.entries.get(n) or entries[n], first) for n in used}
        return values, {number: entry for number, entry in entries.items() if number not in used}

    def _entering(self, entry: Entry, first: int) -> torch.Tensor:
        """What stands for a value from operation ``first`` on. A leaf is made sooner than a `Guard`, and does as well
        where nothing writes into it, says what it needs, or asks what it is: users' code, or autocast, which remembers
        casts of leaves."""
        tensor = entry.tensor.detach()
        if not entry.requires:
            return tensor
        if self._tells_leaves or self.program.written_since(entry.storage, first):
            return Guard.apply(self._root, tensor, NAME)  # type: ignore[no-any-return, no-untyped-call]
        return tensor.requires_grad_()

    def _sharing(self, storage: int, entries: dict[int, Entry]) -> Iterable[int]:
        showing = self._showing[storage]
        if len(showing) <= len(entries):
            return showing
        return [number for number, entry in entries.items() if entry.storage == storage]

    def _replay(
        self,
        values: dict[int, torch.Tensor],
        first: int,
        end: int,
        enter: Any,
        into: Saved | None,
        todo: bytearray | None,
        own: dict[int, Saved],
    ) -> None:
        record = self.program
        last_use, externals, idle, digests = record.last_use, record.externals, record.idle, record.digests
        before = -1
        for k in range(first, end):
            what = (SKIP if k in idle else RUN) if todo is None else todo[k - first]
            numbers = record.arguments_of(k)
            if what != SKIP:
                if record.ambient[k] != before:
                    enter(record.ambients[record.ambient[k]])
                    before = record.ambient[k]
                made = self._made(k, values, numbers, what, into)
                if digests is not None and what == RUN:
                    as_before(record, k, made)
                results = record.results_of(k) if what == RUN else ()
                if len(made) != len(results):
                    raise changed(record, k, f"{len(made)} tensors instead of {len(results)}")
                for number, tensor in zip(results, made, strict=True):
                    if number >= 0 and number not in values and last_use[number] > k:
                        values[number] = tensor
                    del tensor
                del made
                self.operations += 1
            if into is not None:
                if what != RUN:
                    into += own.get(k, ())
                if into:
                    self._took(k, into)
            for n in numbers:
                if (last_use[n] if n >= 0 else externals[~n].last_use) == k:
                    values.pop(n, None)

    def _made(
        self, k: int, values: dict[int, torch.Tensor], numbers: Iterable[int], what: int, into: Saved | None
    ) -> list[torch.Tensor]:
        """The results of operation ``k``; none where only what it saves is asked for."""
        record = self.program
        pattern = record.pattern(k)
        outside = {n: self._outside(n, k) for n in numbers if n not in values}  # one object, however often it is given
        tensors = [values[n] if n in values else outside[n] for n in numbers]
        if record.switched:  # a copy in a restart checkpoint has the need of when it was kept
            needs = record.needs.get(k, {})
            tensors = [
                t if n >= 0 else _needing(t, needs.get(n, record.externals[~n].requires))
                for t, n in zip(tensors, numbers, strict=True)
            ]
        if k in record.hidden:
            return self._of_users(k, tensors, what, into)
        if what == SAVE:
            self._save(k, pattern, tensors, into)
            return []
        return _called(record, k, iter(tensors))

    def _of_users(self, k: int, tensors: Sequence[torch.Tensor], what: int, into: Saved | None) -> list[torch.Tensor]:
        """Of users' code, which may differentiate inside."""
        pattern, hidden = self.program.pattern(k), self.program.hidden[k]
        hidden.check(name_of(self.program, k), pattern.foreign)
        self._running = []
        try:
            if what == SAVE:
                self._save(k, pattern, tensors, into)
                return []
            made = _called(self.program, k, iter(tensors))
        finally:
            self._running = None
        hidden.check(name_of(self.program, k), pattern.foreign)
        return made

    def _unpack(self, place: int) -> torch.Tensor:
        if self._running is None or not place:  # users' code may differentiate inside, and nothing else
            raise inside()
        return still(*self._running[place - 1])

    def _save(self, k: int, pattern: Pattern, tensors: Sequence[torch.Tensor], into: Saved | None) -> None:
        """Into ``into``, which is empty, what operation ``k`` saves of what it is given."""
        assert into is not None
        known = None if self._lessons is None else self._lessons.saved(k, pattern, tensors)
        if known is not None:
            into += known
            return
        self._most = self.program.given[k]
        with contextlib.suppress(_Enough):
            _called(self.program, k, iter(tensors))
        self._most = -1
        if self._lessons is not None:
            self._lessons.has_saved(k, pattern, tensors, into)

    def _outside(self, number: int, k: int) -> torch.Tensor:
        if number >= 0:
            raise ScheduleError(f"value {number} is not there")
        program, one = self.program, self.program.externals[~number]
        if program.writes:
            if one.storage in program.unread.storages or k in program.settled.aside:
                return one.held.clone()  # to be written into again, whatever it holds
            # Never the tensor itself where a replay may write into it.
            if one.storage in program.writes and one.storage not in program.settled.storages:
                shape = tuple(one.tensor.shape)
                raise ScheduleError(f"no restart checkpoint holds a tensor of shape {shape} that is written into")
        tensor = one.again()
        if tensor.requires_grad and not one.leaf and tensor.is_leaf and self._tells_leaves:
            return Guard.apply(self._root, tensor.detach(), NAME)  # type: ignore[no-any-return, no-untyped-call]
        return tensor

    def _took(self, k: int, into: Saved) -> None:
        """Operation ``k`` has saved ``into``, which is emptied."""
        packs = self.program.packs[k]
        if packs and len(into) != packs:
            raise changed(self.program, k, f"{len(into)} tensors to be saved instead of {packs}")
        if packs and functools.reduce(look, (tensor for tensor, _ in into), 0) != self.program.looks[k]:
            raise changed(self.program, k, "tensors of other shapes or dtypes to be saved")
        if packs:  # 0: somebody else's hooks took them in the first sweep
            self.saved[k] = into[:]
        into.clear()


def _needing(tensor: torch.Tensor, need: bool) -> torch.Tensor:
    return tensor if tensor.requires_grad == need else tensor.detach().requires_grad_(need)


def _called(record: Record, k: int, given: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return tensors_of(record.pattern(k).call(given), [])
    except (TapestreamError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        if "allocate memory" in str(error):
            raise
        said = (str(error).splitlines() or [""])[0]
        raise GradientError(
            f"Program: {name_of(record, k)} failed in a replay ({said}); it must depend only on its arguments: take it "
            "out of the program, or allow a budget that keeps all"
        ) from error


class _Enough(BaseException):
    """All that is asked for has been saved."""
