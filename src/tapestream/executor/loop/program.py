"""A schedule's tree as short rows of numbers, so that an action of a loop costs a fraction of a microsecond.

Sub-trees of a few actions are laid out flat once; everything larger is walked with a stack as deep as the tree.
Nothing grows with the number of steps.
"""

from collections.abc import Iterator
from typing import TypeAlias

from tapestream.errors import ScheduleError
from tapestream.ir.actions import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Offload,
    Phase,
    Prefetch,
    Record,
    Restore,
    Tier,
    Wait,
)
from tapestream.ir.schedule import Node, Repeat, Schedule, Series, Shift, distinct_nodes

RECORD, BACKWARD, FORWARD, KEEP, RESTORE, TAKE, FREE, START, WAIT, DROP, PHASE = range(11)
"""What to do. TAKE is a Restore whose restart checkpoint is freed right after; START, WAIT and DROP concern copies."""

Op: TypeAlias = tuple[int, int, int, object]
"""(what, stage, stop or 0, tiers or phase)."""
Row: TypeAlias = tuple[Op, ...]

_LONGEST = 96


class Program:
    """A schedule, laid out once for any number of runs."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._flat = _flattened(schedule.root)

    def rows(self) -> Iterator[tuple[Row, int]]:
        """The schedule's actions in order, as rows to be read ``offset`` stages later."""
        flat = self._flat
        stack: list[tuple[Iterator[tuple[Node, int]], int]] = [(iter(((self.schedule.root, 0),)), 0)]
        while stack:
            nodes, offset = stack[-1]
            found = next(nodes, None)
            if found is None:
                stack.pop()
                continue
            node, by = found
            row = flat.get(id(node))
            if row is not None:
                yield row, offset + by
                continue
            match node:
                case Series(children):
                    stack.append((iter([(child, 0) for child in children]), offset + by))
                case Repeat(body, count, shift):
                    stack.append((_copies(body, count, shift), offset + by))
                case Shift(body, inner):
                    stack.append((iter(((body, inner),)), offset + by))
                case _:
                    raise ScheduleError(f"a loop cannot obey {node}")


def _copies(body: Node, count: int, shift: int) -> Iterator[tuple[Node, int]]:
    return ((body, i * shift) for i in range(count))


def _flattened(root: Node) -> dict[int, Row]:
    """Rows of the nodes that are short, by id of the node (the tree outlives the walk)."""
    flat: dict[int, Row] = {}
    for node in distinct_nodes(root):
        match node:
            case Series(children):
                if all(id(child) in flat for child in children):
                    row = tuple(op for child in children for op in flat[id(child)])
                    if len(row) <= _LONGEST:
                        flat[id(node)] = _joined(row)
            case Repeat(body, count, shift):
                if id(body) in flat and count * len(flat[id(body)]) <= _LONGEST:
                    flat[id(node)] = tuple(_moved(op, i * shift) for i in range(count) for op in flat[id(body)])
            case Shift(body, by):
                if id(body) in flat:
                    flat[id(node)] = tuple(_moved(op, by) for op in flat[id(body)])
            case _:
                flat[id(node)] = (_op(node),)
    return flat


def _joined(row: Row) -> Row:
    """A Restore and the Free after it as one TAKE."""
    out: list[Op] = []
    for op in row:
        if op[0] == FREE and out and out[-1][0] == RESTORE and out[-1][1] == op[1]:
            out[-1] = (TAKE, op[1], 0, None)
        else:
            out.append(op)
    return tuple(out)


def _moved(op: Op, by: int) -> Op:
    what, stage, stop, more = op
    if what == PHASE or not by:
        return op
    return what, stage + by, stop + by if what == FORWARD else stop, more


def _op(action: Action) -> Op:
    match action:
        case Forward(start, stop):
            return FORWARD, start, stop, None
        case Record(stage):
            return RECORD, stage, 0, None
        case Backward(stage):
            return BACKWARD, stage, 0, None
        case Keep(stage):
            return KEEP, stage, 0, None
        case Restore(stage):
            return RESTORE, stage, 0, None
        case Phase(kind):
            return PHASE, 0, 0, kind
        case Offload(value, source, target) | Prefetch(value, source, target) if value.kind is Kind.STATE:
            return START, value.index, 0, (source, target)
        case Wait(value, tier) if value.kind is Kind.STATE:
            return WAIT, value.index, 0, tier
        case Free(value, tier) if value.kind is Kind.STATE:
            return (FREE, value.index, 0, None) if tier is Tier.DEVICE else (DROP, value.index, 0, tier)
        case _:
            raise ScheduleError(f"a loop moves only states, so it cannot obey {action}")
