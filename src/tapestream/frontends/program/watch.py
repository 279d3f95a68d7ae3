"""What the first sweep keeps, restart checkpoints and saved tensors: by a plan, or, while none applies, as it goes."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from tapestream.executor.program.noting.recorder import Recorder
from tapestream.executor.program.record.keeper import Keeper
from tapestream.executor.program.record.record import Record
from tapestream.executor.program.record.tape import Tape
from tapestream.executor.program.replay.moves import Moves
from tapestream.frontends.program.orders import Transfer


class Watch(Protocol):
    """Hears of every operation before it runs.

    ``taped``: the operation from which on everything saved is there; None: nothing is kept now.
    """

    @property
    def taped(self) -> int | None: ...

    def spare(self, nbytes: int, *, anyway: bool) -> bool: ...

    def __call__(self, k: int, saved_nbytes: int) -> None: ...


class _Taped:
    """``nbytes`` of what operations save from one on, each storage once, others having saved it before or not."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.begin(0)

    def begin(self, first: int) -> None:
        """Count what is saved from operation ``first`` on."""
        self.nbytes, self._storages, self._next = 0, set[int](), first
        self._at = self._record.save_ends[first - 1] if first else 0
        self.go_on()

    def go_on(self) -> None:
        """To the end of what there is."""
        record, until = self._record, len(self._record.save_ends)
        if until > self._next:
            for storage in record.saves[self._at : (at := record.save_ends[-1])]:
                if storage not in self._storages:
                    self._storages.add(storage)
                    self.nbytes += record.storage_nbytes[storage]
            self.nbytes += sum(record.inner_nbytes[self._next : until])
            self._at, self._next = at, until


class Online:
    """All that is saved, as long as it fits beside what the program itself holds; then the earliest goes.

    Restart checkpoints stand where backward would have kept another sixteenth of the budget since the last one; where
    they take more than half of it, or leave too little room for the program itself, every second one goes.
    """

    def __init__(self, record: Record, keeper: Keeper, tape: Tape, budget: int) -> None:
        self.record, self.keeper, self.tape, self.budget = record, keeper, tape, budget
        self.recorder: Recorder | None = None
        self.taped: int | None = 0
        self._tick = self._next = max(1, budget // 16)
        self._stride, self._ticks = 1, 0
        self._at: dict[int, int] = {}  # by operation, its tick
        self._kept_nbytes = 0
        self._on_tape = _Taped(record)

    def depart(self, held_nbytes: int) -> None:
        """Nothing was noted so far, and takes so much of the budget."""
        self.budget = max(1, self.budget - held_nbytes)
        self._tick = self._next = max(1, self.budget // 16)

    def begin(self, k: int, saved_nbytes: int, taped: int | None) -> None:
        """Go on from operation ``k``; ``taped``: from which on all is on the tape."""
        self.taped, self._next = k if taped is None else taped, saved_nbytes + self._tick
        for operation in [one for one in self.tape.saved if one < self.taped]:
            del self.tape.saved[operation]
        self._on_tape.begin(self.taped)
        self._kept_nbytes = self.keeper.nbytes(self.record)

    def __call__(self, k: int, saved_nbytes: int) -> None:
        """Keep, or not."""
        recorder = self.recorder
        assert recorder is not None
        recorder.packs.taking = True
        if k and saved_nbytes >= self._next:
            self._next = saved_nbytes + self._tick
            self._ticks += 1
            if self._ticks % self._stride == 0:
                self.keeper.keep(k, recorder.numbers.alive())
                self._at[k] = self._ticks
                self._thin(self.budget // 2)
        self._make_room(k, recorder.numbers.alive_nbytes + recorder.next_nbytes)

    def spare(self, nbytes: int, *, anyway: bool) -> bool:
        """See `Spare`: of the tape, as much goes as need be."""
        recorder = self.recorder
        assert recorder is not None
        own = recorder.numbers.alive_nbytes + nbytes
        self._make_room(len(self.record), own)
        return self._fits(own)

    def _fits(self, own: int) -> bool:
        return own + self._kept_nbytes + self._on_tape.nbytes <= self.budget

    def _make_room(self, k: int, own: int) -> None:
        self._on_tape.go_on()
        while not self._fits(own) and self.taped is not None and self.taped < k:
            following = min((at for at in self._at if at > self.taped), default=k)
            for operation in range(self.taped, following):
                self.tape.saved.pop(operation, None)
            self.taped = following
            self._on_tape.begin(following)
        if not self._fits(own):
            self._thin(max(0, self.budget - own))

    def _thin(self, room: int) -> None:
        """Drop every second restart checkpoint until they take no more than ``room``."""
        self._kept_nbytes = self.keeper.nbytes(self.record)
        while self._at and self._kept_nbytes > room:
            self._stride *= 2
            for operation in [o for o, tick in self._at.items() if tick % self._stride]:
                del self._at[operation]
                if operation in self.keeper.kept:
                    self.keeper.drop(operation)
            self._kept_nbytes = self.keeper.nbytes(self.record)
            if self._stride > self._ticks:
                break


class Turn(NamedTuple):
    """At the beginning of a stretch: the values to keep as a restart checkpoint, None for none; whether to keep what it
    saves. ``stage``: its number; ``state``: values alive there, where that matters for what moves; ``moves``: what
    does."""

    keep: frozenset[int] | None
    take: bool
    stage: int = 0
    state: frozenset[int] | None = None
    moves: Sequence[Transfer] = ()


_AT_MOST = 32
"""Operations between two looks at whether a program is still the one planned for."""


def _acting(turns: Mapping[int, Turn], operations: int) -> list[int]:
    """The operations before which something is to be done, or at least looked at."""
    found, take = list[int](), None
    for k, turn in sorted(turns.items()):
        does = turn.keep is not None or turn.take is not take or turn.state is not None or turn.moves
        if k < operations and (does or k - found[-1] >= _AT_MOST):
            found.append(k)
            take = turn.take
    return found


class Planned:
    """Does what ``turns`` say, by operation; goes on by ``otherwise`` once the program differs from the one planned for
    (``saved``: bytes saved before each of these; ``operations``: how many there are; ``moves``: below the device)."""

    def __init__(
        self,
        turns: Mapping[int, Turn],
        saved: Mapping[int, int],
        operations: int,
        otherwise: Online,
        moves: Moves | None = None,
    ) -> None:
        self._turns, self._saved, self._operations, self.otherwise = turns, saved, operations, otherwise
        self.moves = moves
        self._off = self._void = False
        self._taped: int | None = None
        self._turned = -1  # the last operation before which something was to be done
        self._following = dict(pairwise([*_acting(turns, operations), operations]))

    def spare(self, nbytes: int, *, anyway: bool) -> bool:
        """See `Spare`. Nothing beside what is planned for; what is tried for the first time was not planned for (or
        while a profiler ran, by a guess)."""
        if anyway and not self._off:
            recorder = self.otherwise.recorder
            assert recorder is not None
            self._differs(len(self.otherwise.record), recorder.packs.nbytes)
        return self._off and self.otherwise.spare(nbytes, anyway=anyway)

    @property
    def followed(self) -> bool:
        """Whether the program has made no other operations so far, and the plan still holds."""
        return not (self._off or self._void)

    @property
    def taped(self) -> int | None:
        """See `Watch`."""
        return self.otherwise.taped if self._off else self._taped

    def __call__(self, k: int, saved_nbytes: int) -> None:
        """Keep, or not."""
        if self._off:
            self.otherwise(k, saved_nbytes)
            return
        # Calls that make nothing come with the number of the next operation, after the last one too.
        turn = self._turns[k] if self._turned < k < self._operations and k in self._following else None
        if k > self._operations or (turn is not None and self._saved[k] != saved_nbytes):
            self._differs(k, saved_nbytes)
        elif turn is not None:
            recorder, self._turned = self.otherwise.recorder, k
            assert recorder is not None
            recorder.quiet = self._following[k]
            recorder.packs.taking = turn.take
            self._taped = (k if self._taped is None else self._taped) if turn.take else None
            if turn.keep is not None and k:
                self.otherwise.keeper.keep(k, recorder.alive(turn.keep), turn.keep)
            if self.moves is not None and not self._moved(self.moves, turn, recorder):
                self._differs(k, saved_nbytes)

    def ended(self, last: Turn, results: Sequence[torch.Tensor]) -> bool:
        """The program has made the operations planned for: do what is left. Whether the plan still holds."""
        if self.moves is not None:
            if last.state is not None:
                self.moves.border(last.stage, results)
            if not all(map(self.moves.obey, last.moves)) or self.moves.spoilt:
                self.give_up()
        return self.followed

    def give_up(self) -> None:
        """The plan is of no use: what is below the device goes, and restart checkpoints of which that was a part."""
        self._void = True
        if self.moves is None:
            return
        keeper = self.otherwise.keeper
        for operation in self.moves.abandon():
            if operation in keeper.kept:
                keeper.drop(operation)
        if self._taped is not None and self._taped < self.moves.left_until:
            self._taped = None

    @staticmethod
    def _moved(moves: Moves, turn: Turn, recorder: Recorder) -> bool:
        if turn.state is not None:
            alive = recorder.alive(turn.state)
            moves.border(turn.stage, [alive[number][0] for number in turn.state if number in alive])
        return all(map(moves.obey, turn.moves))

    def _differs(self, k: int, saved_nbytes: int) -> None:
        self.give_up()
        self._off = True
        if self.otherwise.recorder is not None:
            recorder = self.otherwise.recorder
            recorder.flush()
            recorder.quiet, recorder.holding, recorder.packs.holding = 0, {}, {}
        self.otherwise.keeper.unread = frozenset()
        self.otherwise.begin(k, saved_nbytes, self._taped)
        self.otherwise(k, saved_nbytes)
