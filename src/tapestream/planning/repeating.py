"""A stage that changes more than its output, buffers and numbers must find nothing changed when it runs again."""

from collections.abc import Callable
from typing import Any

from tapestream.errors import InputError
from tapestream.runner.ambient import GENERATORS
from tapestream.runner.belongings import Belongings, Change, undo
from tapestream.runner.stage import Stage


def check_runs_alike(
    stage: Stage, before: Belongings, again: Callable[[], bool], changes: list[Change]
) -> tuple[Any, ...]:
    """The random generators of its own from which a run of the stage drew, whose states recomputes have to restore.

    ``before``: what it had before that run; ``again``: runs it once more with torch's, Python's and NumPy's generators
    and buffers as they were, and tells whether it returns the same. Where the two leave the same behind (the last
    attention, a table made at first use), what has changed is added to ``changes``. Raises InputError, with everything
    put back, where it goes further with each run (a list that grows, a mean that is no buffer) or where the output is
    another one.
    """
    after = Belongings(stage.modules, stage.function, before)
    found = before.changes(after)
    drawn = [change for change in found if isinstance(change.holder, GENERATORS)]
    if len(drawn) < len(found):
        undo(drawn)
        same = again()
        last = Belongings(stage.modules, stage.function, before)
        further = [change for change in after.changes(last) if not before.has_number(change)]
        if further or not same:
            undo(found)
            raise InputError(_refusal(stage.name, (further or found)[0].name, further=bool(further)))
    changes += found
    return tuple(change.holder for change in drawn)


def _refusal(stage: str, name: str, *, further: bool) -> str:
    what = "goes further with each run" if further else "changes what the next run returns"
    return (
        f"{stage} changes {name!r}, which {what}: recomputed for its backward, it would not find what it found. Put it "
        "into the state or return it, make it a buffer or a number that is an attribute of a module (recomputes find "
        "those as they were), or change it only where tapestream.recomputing() is false"
    )
