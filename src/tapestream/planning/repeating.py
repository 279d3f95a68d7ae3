"""A stage that changes more than its output, buffers and numbers must find nothing changed when it runs again."""

from collections.abc import Callable
from typing import Any

import torch

from tapestream.capture.cells import among
from tapestream.capture.observe import Observation
from tapestream.capture.python_state import GENERATORS, key_of_generator
from tapestream.errors import InputError
from tapestream.runner.belongings import Belongings, Change, undo
from tapestream.runner.bits import same_bits
from tapestream.runner.stage import Stage
from tapestream.runner.state import State


class KeepsState(InputError):
    """A step finds what the one before has left in attributes, buffers or elsewhere."""


_ROUNDING = 100  # times the relative accuracy of a dtype


def check_runs_alike(
    stage: Stage, before: Belongings, again: Callable[[], bool], changes: list[Change], seen: Observation
) -> tuple[tuple[Any, ...], list[Change]]:
    """The random generators of its own from which a run of the stage drew, whose states recomputes have to restore; and
    where the run has left something: what has changed, and tensors in whose place others of the same content are.

    ``before``: what it had before that run, in which ``seen`` was observed; ``again``: runs it once more with torch's,
    Python's and NumPy's generators
    and buffers as they were, and tells whether it returns the same. Where the two leave the same behind (the last
    attention, a table made at first use), what has changed is added to ``changes``. Raises InputError, with everything
    put back, where it goes further with each run (a list that grows, a mean that is no buffer) or where the output is
    another one.
    """
    after = Belongings(stage.modules, stage.function, before)
    found = [change for change in before.changes(after) if not _written(change, seen)]
    drawn = [change for change in found if isinstance(change.holder, GENERATORS)]
    own = {key_of_generator(one): one for one in (*(one for one, _ in seen.generators), *(c.holder for c in drawn))}
    if len(drawn) < len(found):
        undo(drawn)
        same = again()
        last = Belongings(stage.modules, stage.function, before, copying=False)
        changed = [change for change in after.changes(last) if not _written(change, seen)]
        further = [change for change in changed if not before.has_number(change)]
        if further or not same:
            undo(found)
            raise KeepsState(_refusal(stage.name, (further or found)[0].name, further=bool(further)))
    changes += found
    return tuple(own.values()), [*found, *before.replaced(after)]


def check_generators(stage: Stage, before: Belongings, drawn: tuple[Any, ...]) -> None:
    """Raise InputError where the stage has made one of the random generators ``drawn`` at its first run, which the next
    one finds."""
    if drawn:
        known = {key_of_generator(one) for one in before.generators}
        held = {key_of_generator(one) for one in Belongings(stage.modules, stage.function).generators}
        if any(key in held - known for key in map(key_of_generator, drawn)):
            raise InputError(
                f"{stage.name} makes a random generator at its first run and keeps it, so that a recompute would not "
                "find it as it was; make it before (in __init__, say)"
            )


def _written(change: Change, seen: Observation) -> bool:
    """Whether a tensor was written into, which recomputes find as it was."""
    return isinstance(change.holder, torch.Tensor) and change.key is None and among(seen.cells, change.holder)


def check_repeats(name: str, first: State, again: State) -> None:
    """Raise InputError where two runs of a stage on one state, with the same generators and buffers, return something
    else. Sums may be made in another order (on GPUs, and where threads add into one tensor): rounding is let pass."""
    if not all(map(_alike, first.tensors, again.tensors)):
        raise InputError(
            f"{name} returns something else when it runs again on the same input, so recomputing it would give wrong "
            "gradients: it counts, draws from a generator of its own, or reads something that changes, in a place that "
            "is not checked (a function's attributes, a class, slots, a custom operation). Put that into the state, a "
            "buffer or a number that is an attribute of a module, or draw from the global generators"
        )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided or one.device.type == "meta" or same_bits(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    finite = torch.isfinite(one) & torch.isfinite(other)
    apart = torch.where(finite, one - other, 0).abs().max()
    most = torch.where(finite, one, 0).abs().max()
    return bool(
        (torch.isfinite(one) == torch.isfinite(other)).all() and apart <= _ROUNDING * torch.finfo(one.dtype).eps * most
    )


def _refusal(stage: str, name: str, *, further: bool) -> str:
    what = "goes further with each run" if further else "changes what the next run returns"
    return (
        f"{stage} changes {name!r}, which {what}: a recompute would not find the old value. Put it into the state or "
        "return it, make it a buffer or a number that is an attribute of a module (recomputes find those as they "
        "were), or change it only if tapestream.recomputing() is false"
    )
