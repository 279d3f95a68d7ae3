"""What the judge says: a broken rule with the actions around it, and any action of a tree by its position."""

from typing import NoReturn

from tapestream.errors import ScheduleError
from tapestream.ir import Action, Node, Repeat, Schedule, Series, Shift, Update, Value, distinct_nodes, shifted

_AROUND = 3


class RuleBroken(Exception):
    """Inside the judge: a rule is broken by the current action; `explained` turns it into a ScheduleError."""


def broken(rule: str) -> NoReturn:
    """The current action breaks ``rule``."""
    raise RuleBroken(rule)


def name_of(value: Value) -> str:
    """``STATE 3``, or ``STATE 3 part 1``."""
    return f"{value.kind.name} {value.index}" + (f" part {value.part}" if value.part else "")


def describe(action: Action) -> str:
    """The action as one short line, for messages and timelines."""
    if isinstance(action, Update):
        where = f" in {action.tier.name}" if action.tier else ""
        return f"Update({action.block}" + (f" part {action.part}" if action.part else "") + where + ")"
    fields = (getattr(action, name) for name in type(action).__match_args__)
    words = (name_of(f) if isinstance(f, Value) else getattr(f, "name", None) or str(f) for f in fields)
    return f"{type(action).__name__}({', '.join(words)})"


def explained(schedule: Schedule, position: int, rule: str) -> ScheduleError:
    """The error for ``rule``, broken at ``position`` (the schedule's size when it is its end that breaks one)."""
    sizes = sizes_of(schedule.root)
    total = sizes[id(schedule.root)]
    lines = []
    for at in range(max(0, position - _AROUND), min(total, position + _AROUND + 1)):
        mark = ">" if at == position else " "
        lines.append(f"  {mark} {at}: {describe(action_at(schedule.root, at, sizes))}")
    if position >= total:
        lines.append(f"  > {total}: end of the schedule")
        what = "end of the schedule"
    else:
        what = f"action {position}, {describe(action_at(schedule.root, position, sizes))}"
    by = f" (planner {schedule.planner})" if schedule.planner else ""
    return ScheduleError(f"{what}{by}: {rule}\n" + "\n".join(lines), position=position)


def sizes_of(root: Node) -> dict[int, int]:
    """How many actions each distinct node below ``root`` yields, by ``id``."""
    sizes: dict[int, int] = {}
    for node in distinct_nodes(root):
        match node:
            case Series(children):
                sizes[id(node)] = sum(sizes[id(child)] for child in children)
            case Repeat(body, count):
                sizes[id(node)] = count * sizes[id(body)]
            case Shift(body):
                sizes[id(node)] = sizes[id(body)]
            case _:
                sizes[id(node)] = 1
    return sizes


def action_at(root: Node, position: int, sizes: dict[int, int]) -> Action:
    """The action at ``position`` of the flat schedule, found without walking those before it."""
    node, offset = root, 0
    while True:
        match node:
            case Series(children):
                for child in children:
                    if position < sizes[id(child)]:
                        node = child
                        break
                    position -= sizes[id(child)]
                else:
                    raise IndexError(position)
            case Repeat(body, count, shift):
                turn, position = divmod(position, sizes[id(body)] or 1)
                if turn >= count:
                    raise IndexError(turn)
                node, offset = body, offset + turn * shift
            case Shift(body, by):
                node, offset = body, offset + by
            case _:
                return shifted(node, offset)
