"""A schedule as short rows of numbers, which the engine obeys in a fraction of a microsecond an action.

Sub-trees of a few actions are laid out once. Everything larger is walked with a stack as deep as the tree, so that
nothing grows with the number of steps. What the engine would have to look ahead for is written into the rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

from tapestream.errors import ScheduleError
from tapestream.ir.actions import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    KeepInside,
    Kind,
    Offload,
    Phase,
    Prefetch,
    Record,
    Restore,
    Tier,
    Update,
    Wait,
)
from tapestream.ir.schedule import Node, Repeat, Schedule, Series, Shift, distinct_trees

(
    RECORD, RECORD_LAST, BACKWARD, FORWARD, KEEP, TAKE, RESTORE, FREE,
    START, WAIT, DROP, KEEP_INSIDE, START_BLOCK, WAIT_BLOCK, DROP_BLOCK, UPDATE, PHASE,
) = range(17)  # fmt: skip
"""What to do. RECORD_LAST is a Record of which nobody needs the output: its Backward comes next. TAKE is a Restore
whose restart checkpoint is freed right after. FREE frees a restart checkpoint on the device. START, WAIT and DROP are
about the copies of other values of stages, those with BLOCK about the values of parameter blocks."""

NEUTRAL = frozenset((FREE, START, WAIT, DROP, START_BLOCK, WAIT_BLOCK, DROP_BLOCK, UPDATE))
"""What may come between a Record and its Backward while nobody needs the output."""

Op: TypeAlias = tuple[int, int, int, Any]
"""(what, stage, stop or 0, more). ``stage`` and ``stop`` count from the row's offset. ``more``: of a phase its kind, of
START (value, source, target), of WAIT and DROP (value, tier), of UPDATE (block, part, tier)."""
Row: TypeAlias = tuple[Op, ...]
Laid: TypeAlias = "Row | Callable[[], Iterator[tuple[Laid, int]]]"
"""A node: its only row, or what gives its parts in order, each with the number of stages that it comes later."""

_OF_ONE_STAGE = {Record: RECORD, Backward: BACKWARD, Keep: KEEP, Restore: RESTORE, KeepInside: KEEP_INSIDE}
_LONGEST = 96
_MOST_KEPT = 10_000
"""Of more children than this, the rows are made anew in each run."""
_BY_STAGE = (RECORD, RECORD_LAST, BACKWARD, FORWARD, KEEP, TAKE, RESTORE, FREE, START, WAIT, DROP, KEEP_INSIDE)


class Rows:
    """A schedule, laid out once for any number of runs."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule  # nodes are known by their ids
        self._root = _laid_out(schedule.root)

    def __iter__(self) -> Iterator[tuple[Row, int]]:
        """The actions in order, as rows to be read so many stages later."""
        held: list[tuple[Row, int]] = []  # the first ends with a Record, and none tells whether its output is needed
        for row, offset in self._walked():
            if held:
                following = _first_run(row)
                if following is None:
                    held.append((row, offset))
                    continue
                what, stage = following
                if what == BACKWARD:
                    held[0] = _without_output(*held[0], stage + offset), held[0][1]
                yield from held
                held.clear()
            if _ends_with_record(row):
                held.append((row, offset))
            else:
                yield row, offset
        yield from held

    def _walked(self) -> Iterator[tuple[Row, int]]:
        stack: list[tuple[Iterator[tuple[Laid, int]], int]] = [(iter(((self._root, 0),)), 0)]
        while stack:
            parts, offset = stack[-1]
            for found, by in parts:
                if not isinstance(found, tuple):
                    stack.append((found(), offset + by))
                    break
                yield found, offset + by
            else:
                stack.pop()


def lowered(schedule: Schedule) -> Rows:
    """The rows of a schedule, laid out when they are asked for first."""
    if not schedule.rows:
        schedule.rows.append(Rows(schedule))
    return cast(Rows, schedule.rows[0])


def _laid_out(root: Node) -> Laid:
    laid: dict[int, Laid] = {}
    for node in distinct_trees(root):
        match node:
            case Series(children):
                laid[id(node)] = _in_series(children, laid)
            case Repeat(body, count, shift):
                laid[id(node)] = _repeated(_of(body, laid), count, shift)
            case Shift(body, by):
                found = _of(body, laid)
                laid[id(node)] = _moved(found, by) if isinstance(found, tuple) else partial(iter, ((found, by),))
    return _of(root, laid)


def _of(node: Node, laid: Mapping[int, Laid]) -> Laid:
    return laid[id(node)] if isinstance(node, (Series, Repeat, Shift)) else (_op(node),)


def _in_series(children: tuple[Node, ...], laid: Mapping[int, Laid]) -> Laid:
    if len(children) > _MOST_KEPT:
        return partial(_joining, children, laid)
    parts = tuple(_joining(children, laid))
    return partial(iter, parts) if len(parts) > 1 else parts[0][0] if parts else ()


def _joining(children: Iterable[Node], laid: Mapping[int, Laid]) -> Iterator[tuple[Laid, int]]:
    """The children in order, short ones after each other in one row."""
    ops: list[Op] = []
    for child in children:
        found = _of(child, laid)
        short = isinstance(found, tuple) and len(ops) + len(found) <= _LONGEST
        if ops and not short:
            yield _joined(ops), 0
            ops.clear()
        if isinstance(found, tuple):
            ops += found
        else:
            yield found, 0
    if ops:
        yield _joined(ops), 0


def _repeated(body: Laid, count: int, shift: int) -> Laid:
    if not isinstance(body, tuple):
        return partial(_copies, body, count, shift)
    if not body:
        return body
    together = max(1, _LONGEST // len(body))
    whole, rest = divmod(count, together)
    last = _joined(op for i in range(rest) for op in _moved(body, (whole * together + i) * shift))
    if not whole:
        return last
    row = _joined(op for i in range(together) for op in _moved(body, i * shift))
    if whole == 1 and not rest:
        return row
    return partial(iter, ((partial(_copies, row, whole, together * shift), 0), (last, 0)))


def _copies(body: Laid, count: int, shift: int) -> Iterator[tuple[Laid, int]]:
    return ((body, i * shift) for i in range(count))


def _joined(ops: Iterable[Op]) -> Row:
    """One row. A Restore and the Free after it are one TAKE; a Record of which nobody needs the output is known."""
    out: list[Op] = []
    record = -1  # the place of a Record after which nothing has run so far
    for op in ops:
        what, stage = op[0], op[1]
        if what == FREE and out and out[-1][0] == RESTORE and out[-1][1] == stage:
            out[-1] = (TAKE, stage, 0, None)
            continue
        if what == RECORD:
            record = len(out)
        elif what not in NEUTRAL:
            if what == BACKWARD and record >= 0 and out[record][1] == stage:
                out[record] = (RECORD_LAST, stage, 0, None)
            record = -1
        out.append(op)
    return tuple(out)


def _first_run(row: Row) -> tuple[int, int] | None:
    """What the row runs first and its stage, None if it runs nothing."""
    for what, stage, _, _ in row:
        if what not in NEUTRAL:
            return what, stage
    return None


def _ends_with_record(row: Row) -> bool:
    for op in reversed(row):
        if op[0] not in NEUTRAL:
            return op[0] == RECORD
    return False


def _without_output(row: Row, offset: int, stage: int) -> Row:
    """A row that ends with a Record, before the Backward of ``stage``."""
    at = max(i for i, op in enumerate(row) if op[0] == RECORD)
    if row[at][1] + offset != stage:
        return row
    return (*row[:at], (RECORD_LAST, *row[at][1:]), *row[at + 1 :])


def _moved(row: Row, by: int) -> Row:
    if not by:
        return row
    return tuple(
        (op[0], op[1] + by, op[2] + by if op[0] == FORWARD else 0, op[3]) if op[0] in _BY_STAGE else op for op in row
    )


def _op(action: Action) -> Op:
    match action:
        case Forward(start, stop):
            return FORWARD, start, stop, None
        case Record(stage) | Backward(stage) | Keep(stage) | Restore(stage) | KeepInside(stage):
            return _OF_ONE_STAGE[type(action)], stage, 0, None
        case Free((Kind.STATE, stage, 0), Tier.DEVICE):
            return FREE, stage, 0, None
        case Free(value, tier):
            return DROP if value.kind.by_stage else DROP_BLOCK, value.index, 0, (value, tier)
        case Wait(value, tier):
            return WAIT if value.kind.by_stage else WAIT_BLOCK, value.index, 0, (value, tier)
        case Offload(value, source, target) | Prefetch(value, source, target):
            return START if value.kind.by_stage else START_BLOCK, value.index, 0, (value, source, target)
        case Update(block, part, tier):
            return UPDATE, block, 0, (block, part, tier)
        case Phase(kind):
            return PHASE, 0, 0, kind
        case _:
            raise ScheduleError(f"there is no row for {action}")
