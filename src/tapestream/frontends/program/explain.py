"""`Program.explain`: what a program saves for backward, where its code does so, and what the plan does with it."""

import contextlib
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from tapestream.costs import Budget
from tapestream.errors import InputError
from tapestream.executor.program.calls.patterns import Kinds
from tapestream.executor.program.calls.values import address_of
from tapestream.executor.program.noting.recorder import Recorder
from tapestream.executor.program.record.keeper import Entry, Keeper
from tapestream.executor.program.record.record import ALIVE, Record
from tapestream.executor.program.record.tape import Tape
from tapestream.frontends.below import Below
from tapestream.frontends.program.call import Sweep, sweep
from tapestream.frontends.program.cuts import Borders
from tapestream.frontends.program.explanation import Explanation, Fate, SavedTensor
from tapestream.frontends.program.plans import Prepared, after_sweep, prepare
from tapestream.frontends.program.results import found_in
from tapestream.frontends.program.sizes import Numbers, Sizes
from tapestream.frontends.program.watch import Online
from tapestream.ir import Forward, Free, Kind, Tier, Value
from tapestream.ir import Record as RecordStage
from tapestream.runner.ambient import unchanged_generators
from tapestream.simulate import simulate

_OURS = Path(__file__).parents[2]
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}/", *(f"{_OURS / name}/" for name in ("executor", "frontends")))
Shown = tuple[tuple[int, ...], torch.dtype, int]
"""Shape, dtype, bytes of its storage."""


def explained(
    function: Callable[[], Any],
    device: torch.device,
    room: Budget,
    planner: str,
    kinds: Kinds,
    known: Prepared | None,
    below: Below,
    *,
    gradients_within: bool = False,
) -> Explanation:
    """Run ``function`` once, as a call does, and say what the plan for it does. ``known``: the plan that there is.

    Generators, and tensors of others that the function writes into (buffers), are afterwards as they were. Raises
    InputError where the function returns no tensor or saves nothing for backward, BudgetError where no plan fits.
    """
    budget = room.device_nbytes or 0
    one = looked_at("explain", function, device, budget, kinds)
    found, record = one.found, one.found.record
    borders = Borders(record, found.numbers, gradients_within=gradients_within)
    shape = record.shape()
    prepared = known if known is not None and known.shape == shape and known.fits(room) else None
    prepared = prepared or prepare(borders, shape, room, planner, None, below)
    if prepared.reversal is None:
        cuts, reversal, _ = after_sweep(found, borders, one.online.taped, one.tape, budget, planner)
        prepared = Prepared(shape, None, cuts, reversal)
    return _Planned(record, one.notes, borders, prepared, budget).explanation()


@dataclass(frozen=True, slots=True)
class LookedAt:
    """A call that has run and left nothing: its first sweep, what it saves, who chose what is kept, and the notes."""

    found: Sweep
    tape: Tape
    online: Online
    notes: "_Notes"


def looked_at(what: str, function: Callable[[], Any], device: torch.device, budget: int, kinds: Kinds) -> LookedAt:
    """Run ``function`` once, as a call within ``budget`` bytes does. Generators, and tensors of others that it writes
    into (buffers), are afterwards as they were. Raises InputError, in the name of ``what``, where it returns no tensor
    or saves nothing for backward."""
    record, tape = Record(kinds.copy()), Tape()
    keeper = _Untouched(device, record)
    online = Online(record, keeper, tape, budget)
    notes = _Notes(tape, online)
    notes.recorder = online.recorder = recorder = Recorder(record, keeper, tape, notes)
    recorder.spare = online.spare
    with unchanged_generators(), _own_unchanged(record), keeper.undone():
        found = sweep(function, record, keeper, recorder)
        notes.look()
        if not found_in(found.result):
            raise InputError(
                f"{what}: the function returned {type(found.result).__name__}, in which there is no tensor to "
                "differentiate; return the loss or the output"
            )
        found = Sweep(None, record, keeper, found.numbers, {})
    if not any(record.packs):
        raise InputError(
            f"{what}: the function saves nothing for backward, since nothing that it computes with requires a "
            "gradient; give it a tensor or parameters with requires_grad"
        )
    return LookedAt(found, tape, online, notes)


class _Notes:
    """By operation, the file and line of the innermost frame that is neither torch's nor the recorder's, and what it
    saves that no value shows; by number, what values look like."""

    def __init__(self, tape: Tape, online: Online) -> None:
        self.lines: dict[int, tuple[str, int]] = {}
        self.values: dict[int, Shown] = {}
        self.inside: dict[int, list[Shown]] = {}
        self.recorder: Recorder | None = None
        self._tape, self._online = tape, online
        self._looked = -1  # the last operation whose saved tensors were looked at
        self._addresses: set[int] = set()  # of values that were alive before the last operation

    def __call__(self, k: int, saved_nbytes: int) -> None:
        """Operation ``k`` is about to run."""
        self.look()
        self._online(k, saved_nbytes)
        self.lines[k] = self._line()

    @staticmethod
    def _line() -> tuple[str, int]:
        frame: FrameType | None = sys._getframe(2)
        module = "", 0  # a line of torch.nn, where a program has none of its own
        while frame is not None and frame.f_code is not sweep.__code__:
            file = frame.f_code.co_filename
            if not file.startswith(_NOT_THE_USERS):
                return file, frame.f_lineno
            if not module[1] and frame.f_code.co_name == "forward":
                module = file, frame.f_lineno
            frame = frame.f_back
        return module

    def look(self) -> None:
        """At what the last operation has made and saved."""
        assert self.recorder is not None
        alive = self.recorder.numbers.alive()
        for number in alive.keys() - self.values.keys():
            self.values[number] = _shown(alive[number][0])
        before, self._addresses = self._addresses, {address_of(tensor) for tensor, _ in alive.values()}
        others = {address_of(e.tensor) for e in self.recorder.record.externals}
        known = others | before | self._addresses
        for operation in takewhile(lambda operation: operation > self._looked, reversed(self._tape.saved)):
            found = {address_of(tensor): tensor for tensor, _ in self._tape.saved[operation]}
            inner = [_shown(tensor) for address, tensor in found.items() if address not in known]
            if inner:
                self.inside[operation] = inner
        self._looked = next(reversed(self._tape.saved), self._looked)


@contextlib.contextmanager
def _own_unchanged(record: Record) -> Iterator[None]:
    """Generators that operations were given are afterwards as before."""
    try:
        yield
    finally:
        for one, state in record.own.values():
            one.set_state(state)


class _Untouched(Keeper):
    """Puts back what operations write into tensors of others: their bytes and their versions."""

    def __init__(self, device: torch.device, record: Record) -> None:
        super().__init__(device, record.generators)
        self._record, self._versions = record, contextlib.ExitStack()
        self._copies: dict[int, Entry] = {}

    def before_write(
        self, storage: int, externals: list[tuple[int, torch.Tensor]], copy: torch.Tensor | None = None
    ) -> None:
        """See `Keeper`."""
        for number, tensor in externals:
            if number not in self.kept[0].entries:
                self._versions.enter_context(_unsafe_preserve_version_counter(tensor))
        super().before_write(storage, externals, copy)

    def settle(self, record: Record) -> None:
        """See `Keeper`."""
        self._copies = dict(self.kept[0].entries)  # those of what is never read go now
        super().settle(record)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """What is written inside is undone afterwards."""
        with self._versions:
            try:
                yield
            finally:
                with torch.no_grad():
                    for number, entry in (self._copies or self.kept[0].entries).items():
                        if number < 0:
                            self._record.externals[~number].tensor.copy_(entry.tensor)


class _Planned:
    """A recorded program and the plan for it."""

    def __init__(self, record: Record, notes: _Notes, borders: Borders, prepared: Prepared, budget: int) -> None:
        self.record, self.notes, self.borders, self.budget = record, notes, borders, budget
        self.sizes: Sizes = borders.sizes
        assert prepared.reversal is not None
        self.plan, self.cuts, self.reversal = prepared.plan, prepared.cuts, prepared.reversal
        cuts, reversal = self.cuts, self.reversal
        self.restarts = sorted(cuts[stage] for stage in reversal.kept if stage)
        self.runs = [0] * len(cuts)
        for action in reversal.backward:
            match action:
                case Forward(start, stop):
                    for stage in range(start, stop):
                        self.runs[stage] += 1
                case RecordStage(stage):
                    self.runs[stage] += 1
                case _:
                    pass
        self.storages, self.operations = self.sizes.saves()
        turns = prepared.turns.items()
        gone = [(a.value, cut) for cut, turn in turns for a in turn.moves if isinstance(a, Free) and not a.tier]
        self._gone = dict(gone)  # from the device, before which operation
        self._always = len(record) + 1
        self.taped, self.kept = dict[int, int](), dict[int, int]()  # by storage, the operation until which it stays
        for storage, k in zip(self.storages, self.operations, strict=True):
            if self._is_taped(k):
                self.taped[int(storage)] = max(self.taped.get(int(storage), 0), self._taped_until(int(k)))
        for stage in filter(None, reversal.kept):
            self._keep(self.sizes.needed(cuts[stage]), self._gone.get(Value(Kind.STATE, stage), self._always))
        self._keep(prepared.holding.values, self._always)
        self._held = prepared.holding.saves

    def explanation(self) -> Explanation:
        """All that is to be said."""
        rows = sorted(self._rows(), key=lambda row: -row.nbytes)
        everything = {int(s) for s in self.storages}
        return Explanation(
            tuple(rows), tuple(self.cuts), tuple(self.restarts), self.budget, self._peak_nbytes(),
            tuple(self._live([self.kept, self.taped], self._inner_until)),
            tuple(self._live([dict.fromkeys(everything, self._always)], lambda k: self._always)),
        )  # fmt: skip

    def _taped_until(self, k: int) -> int:
        """Operation ``k`` is recorded in the first sweep: what it saves stays until this one."""
        return self._gone.get(Value(Kind.SAVED, self._stage(k)), self._always)

    def _inner_until(self, k: int) -> int:
        """The same of what no value of operation ``k`` shows."""
        return self._taped_until(k) if self._is_taped(k) else self._always if k in self._held else k

    def _keep(self, numbers: Iterable[int], until: int) -> None:
        for storage in {self.record.storage_of(number) for number in numbers}:
            self.kept[storage] = max(self.kept.get(storage, 0), until)

    def _peak_nbytes(self) -> int:
        if self.plan is not None:
            return self.plan.peak_nbytes
        profile = self.borders.profile(self.cuts)
        return simulate(self.reversal.schedule, profile, None, Budget(self.budget)).peak_nbytes[Tier.DEVICE]

    def _is_taped(self, k: int) -> bool:
        return self._stage(k) in self.reversal.recorded

    def _stage(self, k: int) -> int:
        return bisect_right(self.cuts, k) - 1

    def _rows(self) -> Iterator[SavedTensor]:
        """One for each storage that is saved, and one for each tensor that only its operation knows."""
        seconds, first = self.sizes.seconds(), dict[int, int]()
        for value, storage in enumerate(self.record.storage):
            first.setdefault(storage, value)
        for storage in sorted({int(s) for s in self.storages}):
            nbytes = int(self.sizes.nbytes[storage])
            value = first.get(storage, -1)
            if nbytes and value in self.notes.values:
                shape, dtype, _ = self.notes.values[value]
                made = self.record.birth[value]
                yield self._row(made, shape, dtype, nbytes, seconds, self._fate(storage, made))
        for k, inner in self.notes.inside.items():
            for shape, dtype, nbytes in inner:
                again: Fate = "restart checkpoint" if k in self._held else "recomputed"
                taped: Fate = "kept" if self._taped_until(k) == self._always else "moved"
                fate: Fate = taped if self._is_taped(k) else again
                yield self._row(k, shape, dtype, nbytes, seconds, fate)

    def _row(
        self, k: int, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int, seconds: Numbers, fate: Fate
    ) -> SavedTensor:
        file, line = self.notes.lines[k]
        function = self.record.pattern(k).function
        name = getattr(function, "__name__", None) or type(function).__name__
        if name in ("__get__", "__set__"):
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        times = self.runs[self._stage(k)] if fate == "recomputed" else 0
        return SavedTensor(
            file, line, name, shape, str(dtype).removeprefix("torch."), nbytes, float(seconds[k]), fate, times
        )

    def _fate(self, storage: int, made: int) -> Fate:
        if storage in self.taped:
            return "kept" if self.taped[storage] == self._always else "moved"
        if storage in self.kept:
            return "restart checkpoint" if self.kept[storage] == self._always else "moved"
        return "recomputed"

    def _live(self, until: Sequence[Mapping[int, int]], inner_until: Callable[[int], int]) -> list[int]:
        """Bytes while each operation of the first sweep runs; ``until``: by storage, before which operation it goes,
        ``inner_until``: the same of what only an operation knows."""
        n, sizes, death = len(self.record), self.sizes, numpy.array(self.record.death, dtype=numpy.int64)
        stop = sizes.stop.copy()
        numpy.maximum.at(stop, sizes.storage, numpy.where(death == ALIVE, n, numpy.minimum(death - 1, n)))
        for storage, operation in (pair for one in until for pair in one.items()):
            stop[storage] = max(stop[storage], min(operation - 1, n))
        inner: Numbers = numpy.zeros(n + 1, dtype=numpy.int64)
        for k, nbytes in enumerate(self.record.inner_nbytes):
            if (end := inner_until(k)) > k:
                inner[k + 1] += nbytes
                inner[min(end, n)] -= nbytes if end <= n else 0
        live = sizes.spans(sizes.start, stop, sizes.nbytes)[:n] + sizes.made + numpy.cumsum(inner)[:n]
        return [int(nbytes) for nbytes in live]


def _shown(tensor: torch.Tensor) -> Shown:
    nbytes = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
    return tuple(tensor.shape), tensor.dtype, nbytes
