"""Results that backward does not reach, as is supposed where there is no room for a backward that reaches all."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from tapestream.errors import BudgetError
from tapestream.executor.program.calls.users import by_user
from tapestream.executor.program.record.record import ALIVE, Record
from tapestream.executor.program.record.tape import Tape
from tapestream.frontends.program.call import Sweep
from tapestream.frontends.program.results import found_in
from tapestream.units import format_nbytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unreached:
    """The ``operations`` on which no result of one element depends: of what is returned beside a loss, say. Plans that
    leave them out serve a backward from the losses, within less than ``least_nbytes``, the least that serves all."""

    operations: frozenset[int]
    least_nbytes: int

    @classmethod
    def beside_losses(cls, found: Sweep, least_nbytes: int) -> "Unreached | None":
        """None where no result has its operations for itself."""
        record, losses, others = found.record, set[int](), set[int]()
        results = [t for t in found_in(found.result) if t.requires_grad]
        for number in found.numbers:
            tensor = found.shown[number]
            if tensor.requires_grad:
                (losses if tensor.numel() == 1 else others).add(number)
        if not losses or not others or len(losses) + len(others) < len(results):
            return None
        operations = frozenset(range(len(record))) - _reached(record, losses)
        held = (v for v, death in enumerate(record.death) if death == ALIVE and record.birth[v] in operations)
        if not operations or any(value not in found.shown for value in held):
            return None  # somebody may begin a backward from what is no result
        return cls(operations, least_nbytes)

    def watch(self, found: Sweep, reached: Callable[[], Any]) -> None:
        """Have a backward told that comes to one of them; ``reached`` hears of it first. The graph holds all this."""
        birth = found.record.birth
        for number, tensor in found.shown.items():
            if birth[number] in self.operations and tensor.grad_fn is not None:
                shape, least = tuple(tensor.shape), self.least_nbytes

                def refuse(_: Any, shape: tuple[int, ...] = shape, least: int = least) -> None:
                    reached()
                    raise BudgetError(
                        f"Program: backward reaches a result of shape {shape}, and the budget leaves no room for more "
                        f"than the results of one element; the least found to work for all results is "
                        f"{format_nbytes(least)} ({least} bytes). Allow that much, or detach() the result",
                        least_nbytes=least,
                    )

                tensor.grad_fn.register_prehook(refuse)


def for_losses(plan: Callable[[], T], found: Sweep, tape: Tape, anew: Callable[[], Any]) -> tuple[T, Unreached | None]:
    """What ``plan`` finds; where it does not fit, what it finds, ``anew``, if backward reaches the losses alone. Raises
    BudgetError, which names what does for all results."""
    try:
        return plan(), None
    except BudgetError as error:
        least = error.least_nbytes
        unreached = None if least is None else Unreached.beside_losses(found, least)
        if unreached is None:
            raise
        found.record.unreached = unreached.operations
        anew()
        with suppress(BudgetError):
            made = plan()
            for operation in unreached.operations:
                tape.saved.pop(operation, None)
            return made, unreached
        raise


def _reached(record: Record, losses: set[int]) -> set[int]:
    """Operations on which ``losses`` depend, and those that do more than make their results."""
    users = [by_user(pattern.function) for pattern in record.patterns.all]
    always = {k for operations in record.writes.values() for k in operations}.union(record.drawn)
    values, found = set(losses), set[int]()
    for k in range(len(record) - 1, -1, -1):
        results: Sequence[int] = record.results_of(k)
        gives_back = any(n < 0 or record.birth[n] < k for n in results)
        if k in always or users[record.calls[k]] or gives_back or not values.isdisjoint(results):
            found.add(k)
            values.update(record.arguments_of(k))
    return found
