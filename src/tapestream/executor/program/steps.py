"""`ProgramSteps`: runs stretches of a recorded program again, as `LoopDriver` asks.

Each stretch is recorded as a graph of its own from the values alive at its beginning, and seeded with the cotangents of
those alive at its end and with the sums of all later gradients of external tensors: additions come in plain autograd's
order.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from tapestream.errors import GradientError
from tapestream.executor.loop.steps import differentiated, edge_of
from tapestream.executor.program.keeper import Entry, Kept
from tapestream.executor.program.patterns import tensors_of
from tapestream.executor.program.record import Ambient, Record
from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.guards import Guard, escaped

NAME = "the program"
Cotangent = dict[int, torch.Tensor]


@dataclass(slots=True)
class Tape:
    """One recorded stretch: where cotangents leave and enter, by value, and the external tensors used."""

    inputs: dict[int, GradientEdge]
    edges: dict[int, Any]
    used: list[int]


class ProgramSteps:
    """See `driver.Steps`. ``cuts``: the operations before which stretches begin, and the end.

    ``sums``: by external tensor, the gradient accumulated so far. ``operations`` counts those run again.
    """

    def __init__(self, record: Record, cuts: Sequence[int], device: torch.device) -> None:
        self.program, self.cuts, self.device = record, cuts, device
        self.sums: dict[int, torch.Tensor] = {}
        self.operations = 0
        self._root = torch.empty(0, requires_grad=True)
        self._targets: dict[int, torch.Tensor] = {}
        self._used: set[int] = set()
        self._first: TorchGenerators | None = None

    def forward(self, state: Kept, start: int, stop: int) -> Kept:
        """The state before stretch ``stop``, keeping nothing."""
        for stage in range(start, stop):
            with saved_tensors_hooks(_drop, _refuse):
                state, _ = self._run(state, stage)
        return state

    def record(self, state: Kept, stage: int) -> tuple[Kept, Tape]:
        """Run a stretch and keep its graph."""
        return self._run(state, stage)

    def backward(self, tape: Tape, stage: int, cotangent: Cotangent) -> Cotangent:
        """Consume the graph of a stretch."""
        roots = [edge for number, edge in tape.edges.items() if number in cotangent]
        seeds = [cotangent[number] for number in tape.edges if number in cotangent]
        if not roots:
            return {}
        for k in tape.used:
            if k in self.sums:
                roots.append(self._target(k))
                seeds.append(self.sums[k])
        asked = (*tape.inputs.values(), *(self._target(k) for k in tape.used))
        if not asked:
            return {}
        found = iter(differentiated(tuple(roots), tuple(seeds), asked))
        given = {number: g for number in tape.inputs if (g := next(found)) is not None}
        for k in tape.used:
            total = next(found)
            if total is not None:
                self.sums[k] = total
        return given

    def keep(self, state: Kept) -> Kept:
        """A restart checkpoint."""
        kept = state.unshared(self.program)
        return Kept(kept.operation, kept.entries, self._generators())

    def _generators(self) -> TorchGenerators:
        if self._first is None or self.program.draws_nbytes:
            self._first = TorchGenerators.capture(self.device)
        return self._first

    def restore(self, kept: Kept, last: bool) -> Kept:
        """The live state of a restart checkpoint."""
        kept.check()
        assert kept.generators is not None
        kept.generators.restore(self.device)
        return kept.unshared(self.program)  # the last time too: several restart checkpoints may share one copy

    # -- one stretch ----------------------------------------------------------------------------------------------

    def _run(self, state: Kept, stage: int) -> tuple[Kept, Tape]:
        first, end = self.cuts[stage], self.cuts[stage + 1]
        self._used = set()
        with torch.enable_grad():
            values, inputs = self._entered(state)
        del state
        with self._surroundings() as enter:
            self._replay(values, first, end, enter)
        record = self.program
        after: dict[int, Entry] = {}
        edges: dict[int, Any] = {}
        for number, tensor in values.items():
            storage = record.storage[number] if number >= 0 else record.externals[~number].storage
            after[number] = Entry.of(tensor, storage, private=True)
            if tensor.requires_grad:
                edges[number] = edge_of(tensor)
        return Kept(end, after), Tape(inputs, edges, sorted(self._used))

    def _entered(self, state: Kept) -> tuple[dict[int, torch.Tensor], dict[int, GradientEdge]]:
        values: dict[int, torch.Tensor] = {}
        inputs: dict[int, GradientEdge] = {}
        for number, entry in state.entries.items():
            if entry.requires:
                values[number] = Guard.apply(self._root, entry.tensor, NAME)  # type: ignore[no-untyped-call]
                inputs[number] = get_gradient_edge(values[number])
            else:
                values[number] = entry.tensor.detach()
        return values, inputs

    def _replay(self, values: dict[int, torch.Tensor], first: int, end: int, enter: Any) -> None:
        record = self.program
        last_use, externals = record.last_use, record.externals
        before = -1
        for k in range(first, end):
            if record.ambient[k] != before:
                enter(record.ambients[record.ambient[k]])
                before = record.ambient[k]
            numbers = record.arguments_of(k)
            given = [values[n] if n in values else self._external(~n) for n in numbers]
            made = tensors_of(record.pattern(k).call(iter(given)), [])
            del given
            results = record.results_of(k)
            if len(made) != len(results):
                raise changed(record, k, f"{len(made)} tensors instead of {len(results)}")
            for number, tensor in zip(results, made, strict=True):
                if number < 0:
                    continue
                if number not in values and last_use[number] > k:
                    values[number] = tensor
            for n in numbers:
                if (last_use[n] if n >= 0 else externals[~n].last_use) == k:
                    values.pop(n, None)
        self.operations += end - first

    def _external(self, k: int) -> torch.Tensor:
        found = self.program.externals[k].tensor
        if not found.requires_grad:
            return found
        self._used.add(k)
        return self._target(k)

    def _target(self, k: int) -> torch.Tensor:
        """External tensor ``k``, or what stands in for it where it has a graph: gradients stop there."""
        found = self._targets.get(k)
        if found is None:
            external = self.program.externals[k]
            found = external.tensor
            if not external.leaf:
                with torch.enable_grad():
                    found = Guard.apply(self._root, found.detach(), NAME)  # type: ignore[no-untyped-call]
            self._targets[k] = found
        return found

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


def _drop(tensor: torch.Tensor) -> None:
    return None


def _refuse(nothing: None) -> torch.Tensor:
    raise escaped(NAME)
