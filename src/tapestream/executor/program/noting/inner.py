"""`Inner`: a gradient that a program takes inside (``torch.autograd.grad``), as one operation.

What autograd saves while a program runs may be dropped, so the graph of its own run cannot be asked. The operations
that lead from the inputs to the outputs are in the record: they run again in a graph of their own, which goes with the
call. Its result is a tensor like others, without a gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from tapestream.errors import GradientError, InputError
from tapestream.executor.program.calls.patterns import Pattern, tensors_of
from tapestream.executor.program.noting.numbering import Numbering
from tapestream.executor.program.record.ambients import surroundings
from tapestream.executor.program.record.record import Ambient, Record

GRAD = torch.autograd.grad
_ELSEWHERE = "; a ts.Loop or ts.Chain takes steps that do"


class Step(NamedTuple):
    """One operation, on tensors by their places."""

    pattern: Pattern
    ambient: Ambient
    given: tuple[int, ...]
    made: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Inner:
    """Called on the tensors that enter, of which the first ``leaves`` are differentiated by, and the cotangents of
    ``outputs``. ``inputs``: places of all that it is differentiated by, results of steps among them. ``key``: equal for
    those that do the same."""

    steps: tuple[Step, ...]
    entering: int
    leaves: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seeded: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...]
    key: tuple[Any, ...]

    __name__ = "torch.autograd.grad"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inner) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients."""
        values = {i: _entering(t, needs=i < self.leaves) for i, t in enumerate(tensors[: self.entering])}
        cotangents = iter(tensors[self.entering :])
        with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, _same):
            with surroundings([step.ambient for step in self.steps]) as enter:
                for step in self.steps:
                    enter(step.ambient)
                    found = tensors_of(step.pattern.call(iter([values[i] for i in step.given])), [])
                    values.update(zip(step.made, found, strict=True))
            roots = [values[i] for i in self.outputs]
            seeds = [next(cotangents) if seeded else None for seeded in self.seeded]
            return GRAD(roots, [values[i] for i in self.inputs], seeds, **dict(self.options))


def inner_of(record: Record, numbers: Numbering, args: Any, kwargs: Any) -> tuple[Inner, list[torch.Tensor]]:
    """What ``torch.autograd.grad(*args, **kwargs)`` asks for, and the tensors that it is given.

    Raises InputError or GradientError, by name, for what cannot run again by itself.
    """
    outputs, inputs, cotangents, options = _asked(*args, **kwargs)
    ends, starts = ([_number(record, numbers, t) for t in found] for found in (outputs, inputs))
    operations, leaves, feeds = _between(record, starts, ends)
    _check(record, operations)
    alive = {number: tensor for number, (tensor, _) in numbers.alive().items()}
    entering = [_there(record, alive, n) for n in (*leaves, *feeds)]
    places = {n: i for i, n in enumerate((*leaves, *feeds))}
    steps = []
    for k in operations:
        given = tuple(places[n] for n in record.arguments_of(k))
        made = tuple(places.setdefault(n, len(places)) for n in record.results_of(k))
        steps.append(Step(record.pattern(k), record.ambients[record.ambient[k]], given, made))
    seeded = tuple(t is not None for t in cotangents)
    chosen = tuple(sorted(options.items()))
    into, out = (tuple(places[n] for n in found) for found in (starts, ends))
    what = tuple((s.pattern.kind, s.ambient.alike(), s.given, s.made) for s in steps)
    key = what, len(entering), len(leaves), into, out, seeded, chosen
    inner = Inner(tuple(steps), len(entering), len(leaves), into, out, seeded, chosen, key)
    return inner, [*entering, *(t for t in cotangents if t is not None)]


def _asked(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False,
    only_inputs: bool = True, allow_unused: bool | None = None, is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor | None], dict[str, Any]]:  # fmt: skip
    if create_graph or is_grads_batched:
        what = "create_graph=True" if create_graph else "is_grads_batched=True"
        raise InputError(
            f"Program: torch.autograd.grad is called inside with {what}, which a program does not take{_ELSEWHERE}"
        )
    outputs, inputs = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (outputs, inputs))
    if not all(isinstance(t, torch.Tensor) for t in (*outputs, *inputs)):
        raise InputError("Program: torch.autograd.grad is given edges of the graph inside; give it tensors")
    seeds = [None] * len(outputs) if grad_outputs is None else grad_outputs
    seeds = [seeds] if isinstance(seeds, torch.Tensor) else list(seeds)
    return outputs, inputs, seeds, {"allow_unused": allow_unused, "materialize_grads": materialize_grads}


def _number(record: Record, numbers: Numbering, tensor: torch.Tensor) -> int:
    number = numbers.of(tensor)
    return numbers.given((tensor,), len(record))[0] if number is None else number


def _between(record: Record, starts: Sequence[int], ends: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """The operations that lead from ``starts`` to ``ends``, in order; those of ``starts`` that none of them makes; and
    what else they are given."""
    first = min(record.birth[n] + 1 if n >= 0 else record.externals[~n].first_use for n in starts)
    reached, leading = set(starts), list[int]()
    for k in range(max(0, first), len(record)):
        if reached.intersection(record.arguments_of(k)):
            reached.update(record.results_of(k))
            leading.append(k)
    made_of_others = {n for k in leading for n in record.results_of(k) if n not in record.arguments_of(k)}
    leaves = list(dict.fromkeys(n for n in starts if n not in made_of_others))
    wanted, found = {*ends, *starts}, list[int]()
    for k in reversed(leading):
        if wanted.intersection(record.results_of(k)).difference(leaves):
            wanted.update(record.arguments_of(k))
            found.append(k)
    operations = found[::-1]
    made_here = {n for k in operations for n in record.results_of(k)}
    given = dict.fromkeys((*(n for k in operations for n in record.arguments_of(k)), *ends, *starts))
    return operations, leaves, [n for n in given if n not in made_here and n not in leaves]


def _check(record: Record, operations: Sequence[int]) -> None:
    if not operations:
        return
    storages = {record.storage_of(n) for k in operations for n in (*record.arguments_of(k), *record.results_of(k))}
    if any(record.written_since(storage, operations[0]) for storage in storages):
        raise GradientError(
            "Program: torch.autograd.grad is called inside, and what it differentiates writes into tensors, so that it "
            f"cannot run again by itself; use operations that do not{_ELSEWHERE}"
        )
    if not set(operations).isdisjoint(record.drawn):
        raise GradientError(
            "Program: torch.autograd.grad is called inside, and what it differentiates draws random numbers, so that "
            f"it cannot run again by itself; draw before (eval() switches dropout off){_ELSEWHERE}"
        )


def _there(record: Record, alive: Mapping[int, torch.Tensor], number: int) -> torch.Tensor:
    tensor = alive.get(number) if number >= 0 else record.externals[~number].tensor
    if tensor is None:
        raise GradientError(
            "Program: torch.autograd.grad is called inside, but a tensor that its outputs were computed from is gone; "
            f"keep it until then{_ELSEWHERE}"
        )
    return tensor


def _entering(tensor: torch.Tensor, *, needs: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(needs or tensor.requires_grad)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
