"""`ProgramSteps`: runs stretches of a recorded program again, from the values alive at their beginning.

A stretch is recorded by running it as a graph of its own of which nothing but what it saves is kept: backward goes
through the graph of the program's own run, and asks for that (see `Tape`).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tapestream.errors import GradientError
from tapestream.executor.program.keeper import Entry, Kept
from tapestream.executor.program.patterns import tensors_of
from tapestream.executor.program.record import Ambient, Record
from tapestream.executor.program.tape import Saved, inside
from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.guards import Guard

NAME = "the program"


class ProgramSteps:
    """``cuts``: the operations before which stretches begin, and the end. ``saved``: see `Tape`.

    ``stages`` and ``operations`` count those run again.
    """

    def __init__(self, record: Record, cuts: Sequence[int], device: torch.device, saved: dict[int, Saved]) -> None:
        self.program, self.cuts, self.device, self.saved = record, cuts, device, saved
        self.stages = self.operations = 0
        self._root = torch.empty(0, requires_grad=True)
        self._first: TorchGenerators | None = None

    def forward(self, state: Kept, start: int, stop: int) -> Kept:
        """The state before stretch ``stop``, keeping nothing."""
        for stage in range(start, stop):
            state = self._run(state, stage, None)
        return state

    def record(self, state: Kept, stage: int) -> Kept:
        """The state after a stretch; what it saves is kept."""
        return self._run(state, stage, [])

    def forget(self, stage: int) -> None:
        """Drop what is left of what a stretch has saved."""
        for operation in range(self.cuts[stage], self.cuts[stage + 1]):
            self.saved.pop(operation, None)

    def keep(self, state: Kept) -> Kept:
        """A restart checkpoint."""
        kept = state.unshared(self.program)
        return Kept(kept.operation, kept.entries, self._generators())

    def _generators(self) -> TorchGenerators:
        if self._first is None or self.program.draws_nbytes:
            self._first = TorchGenerators.capture(self.device)
        return self._first

    def restore(self, kept: Kept) -> Kept:
        """The live state of a restart checkpoint."""
        kept.check()
        assert kept.generators is not None
        kept.generators.restore(self.device)
        return kept.unshared(self.program)  # the last time too: several restart checkpoints may share one copy

    # -- one stretch ----------------------------------------------------------------------------------------------

    def _run(self, state: Kept, stage: int, into: Saved | None) -> Kept:
        first, end = self.cuts[stage], self.cuts[stage + 1]
        with torch.enable_grad():
            values = self._entered(state)
        del state

        def pack(tensor: torch.Tensor) -> None:
            if into is not None:
                into.append((tensor.detach(), tensor._version))

        with self._surroundings() as enter, saved_tensors_hooks(pack, _refuse):
            self._replay(values, first, end, enter, into)
        record = self.program
        after: dict[int, Entry] = {}
        for number, tensor in values.items():
            storage = record.storage[number] if number >= 0 else record.externals[~number].storage
            after[number] = Entry.of(tensor, storage, private=True)
        self.stages += 1
        return Kept(end, after)

    def _entered(self, state: Kept) -> dict[int, torch.Tensor]:
        """The values, each as a tensor of its own that an operation may write into."""
        return {
            number: Guard.apply(self._root, entry.tensor, NAME) if entry.requires else entry.tensor.detach()  # type: ignore[no-untyped-call]
            for number, entry in state.entries.items()
        }

    def _replay(self, values: dict[int, torch.Tensor], first: int, end: int, enter: Any, into: Saved | None) -> None:
        record = self.program
        last_use, externals = record.last_use, record.externals
        before = -1
        for k in range(first, end):
            if record.ambient[k] != before:
                enter(record.ambients[record.ambient[k]])
                before = record.ambient[k]
            numbers = record.arguments_of(k)
            given = [values[n] if n in values else externals[~n].tensor for n in numbers]
            made = tensors_of(record.pattern(k).call(iter(given)), [])
            del given
            results = record.results_of(k)
            if len(made) != len(results):
                raise changed(record, k, f"{len(made)} tensors instead of {len(results)}")
            for number, tensor in zip(results, made, strict=True):
                if number >= 0 and number not in values and last_use[number] > k:
                    values[number] = tensor
            del made
            for n in numbers:
                if (last_use[n] if n >= 0 else externals[~n].last_use) == k:
                    values.pop(n, None)
            if into:
                self._took(k, into)
        self.operations += end - first

    def _took(self, k: int, into: Saved) -> None:
        """Operation ``k`` has saved ``into``, which is emptied."""
        packs = self.program.packs[k]
        if packs and len(into) != packs:
            raise changed(self.program, k, f"{len(into)} tensors to be saved instead of {packs}")
        if packs:  # 0: somebody else's hooks took them in the first sweep
            self.saved[k] = into[:]
        into.clear()

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[Any]:
        """Gives what sets the surroundings of an operation; afterwards all is as before."""
        kinds = sorted({kind for ambient in self.program.ambients for kind, _, _ in ambient.casts})
        casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        cache, dtype, grad = torch.is_autocast_cache_enabled(), torch.get_default_dtype(), torch.is_grad_enabled()
        epoch = [-1]

        def enter(ambient: Ambient) -> None:
            if ambient.epoch != epoch[0]:
                torch.clear_autocast_cache()
                epoch[0] = ambient.epoch
            torch.set_grad_enabled(ambient.grad)
            for kind, on, precision in ambient.casts:
                torch.set_autocast_enabled(kind, on)
                if precision is not None:
                    torch.set_autocast_dtype(kind, precision)
            torch.set_autocast_cache_enabled(ambient.cache)
            torch.set_default_dtype(ambient.dtype)

        try:
            yield enter
        finally:
            torch.clear_autocast_cache()
            torch.set_grad_enabled(grad)
            for kind, on, precision in casts:
                torch.set_autocast_enabled(kind, on)
                torch.set_autocast_dtype(kind, precision)
            torch.set_autocast_cache_enabled(cache)
            torch.set_default_dtype(dtype)


def changed(record: Record, k: int, how: str) -> GradientError:
    """A replay gave something else than the first run."""
    name = getattr(record.pattern(k).function, "__name__", record.pattern(k).function)
    return GradientError(
        f"Program: operation {k} ({name}) gave {how} when it was run again; what it gives must depend on nothing but "
        "its arguments and torch's global random generator"
    )


def _refuse(nothing: None) -> torch.Tensor:
    raise inside()
