"""The text form of a `Schedule`: one line per action, composite nodes numbered, children before parents.

    tapestream schedule 1
    stages 3
    planner revolve
    resident PARAMETERS 0 HOST
    @0 = repeat 3 shift 1 of Record 0
    @1 = series
      Phase FORWARD
      @0
    root @1
    end

A node that is used in several places is written once and named in each, so text and time are linear in distinct nodes,
and nothing nests however deep the tree is. Values are a kind and a number (``STATE 3``, part 1 of it ``STATE 3.1``),
and so are updates (``Update 3``, ``Update 3.1``).
"""

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

from tapestream.errors import InputError
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
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Tier,
    Update,
    Value,
    Wait,
)
from tapestream.ir.schedule import Node, Repeat, Schedule, Series, Shift, distinct_nodes

_T = TypeVar("_T")
_ESCAPED = re.compile(r"(?:[^\\]|\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}))*")
_FIRST_LINE = "tapestream schedule 1"
_NAMES: dict[str, type[Action]] = {
    kind.__name__: kind
    for kind in (Forward, Record, Backward, Keep, KeepInside, Restore, Offload, Prefetch, Wait, Free, Update, Phase)
}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,30})")
_DEFINITION = re.compile(
    r"@([0-9]+) = (?:(series)|repeat ([0-9]{1,30}) shift (-?[0-9]{1,30}) of (.+)|shift (-?[0-9]{1,30}) of (.+))"
)


def dumps(schedule: Schedule) -> str:
    """The schedule as text; `loads` gives an equal schedule with the same nodes shared."""
    lines = [_FIRST_LINE, f"stages {schedule.stages}"]
    lines.append(f"planner {schedule.planner.encode('unicode_escape').decode('ascii')}")
    lines += [f"resident {_value_text(value)} {tier.name}" for value, tier in schedule.resident]
    numbers: dict[int, str] = {}  # by id of the node

    def reference(node: Node) -> str:
        return numbers[id(node)] if isinstance(node, (Series, Repeat, Shift)) else _action_text(node)

    for node in distinct_nodes(schedule.root):
        name = f"@{len(numbers)}"
        match node:
            case Series(children):
                lines.append(f"{name} = series")
                lines += [f"  {reference(child)}" for child in children]
            case Repeat(body, count, shift):
                lines.append(f"{name} = repeat {count} shift {shift} of {reference(body)}")
            case Shift(body, by):
                lines.append(f"{name} = shift {by} of {reference(body)}")
            case _:
                continue
        numbers[id(node)] = name
    lines += [f"root {reference(schedule.root)}", "end", ""]
    return "\n".join(lines)


def loads(text: str) -> Schedule:
    """The schedule that `dumps` wrote. Raises InputError naming the line where the text is not of that form."""
    reader = _Reader(text)
    try:
        return reader.schedule()
    except _Unreadable as found:
        raise InputError(
            f"not the text of a schedule, line {reader.at}: expected {found}, found {reader.line[:80]!r}; "
            "write it again with tapestream.ir.dumps"
        ) from None


class _Unreadable(Exception):
    """What was expected in the current line."""


class _Reader:
    """Reads line by line; ``line`` is the current one, ``at`` its number, from 1."""

    def __init__(self, text: str) -> None:
        self.lines = iter(text.replace("\r\n", "\n").split("\n"))
        self.at = 0
        self.line = ""
        self.nodes: list[Node] = []

    def advance(self) -> None:
        """Go to the next line; the text must not end here."""
        self.at += 1
        found = next(self.lines, None)
        self.line = "" if found is None else found
        if found is None:
            raise _Unreadable("more lines, up to the one that says 'end'")

    def schedule(self) -> Schedule:
        """The whole text."""
        self.advance()
        if self.line != _FIRST_LINE:
            raise _Unreadable(f"the first line {_FIRST_LINE!r}")
        self.advance()
        stages = _number(self.rest_after("stages "))
        self.advance()
        planner = self.rest_after("planner ")
        if not planner.isascii() or not _ESCAPED.fullmatch(planner):
            raise _Unreadable("the planner's name, in ASCII with escapes")
        try:
            planner = planner.encode("ascii").decode("unicode_escape")
        except UnicodeError:  # beyond the last code point
            raise _Unreadable("the planner's name, in ASCII with escapes") from None
        self.advance()
        resident = tuple(self.residents())
        while self.line.startswith("@"):
            self.definition()
        root = self.reference(self.rest_after("root "))
        self.advance()
        if self.line != "end":
            raise _Unreadable("'end'")
        for rest in self.lines:
            self.at, self.line = self.at + 1, rest
            if rest:
                raise _Unreadable("nothing after 'end'")
        return Schedule(root, stages, resident, planner)

    def residents(self) -> Iterator[tuple[Value, Tier]]:
        """The lines that start with ``resident``."""
        while self.line.startswith("resident "):
            words = _words(self.rest_after("resident "))
            value, tier = _read_value(words), _read_tier(words)
            _check_empty(words)
            yield value, tier
            self.advance()

    def definition(self) -> None:
        """One composite node, which gets the next number."""
        match = _DEFINITION.fullmatch(self.line)
        if not match or match[1] != str(len(self.nodes)):
            raise _Unreadable(f"'@{len(self.nodes)} = series', 'repeat .. shift .. of ..' or 'shift .. of ..'")
        _, is_series, count, step, repeated, by, moved = match.groups()
        if is_series:
            self.nodes.append(Series(tuple(self.children())))
            return
        if count is not None:
            self.nodes.append(Repeat(self.reference(repeated), int(count), int(step)))
        else:
            self.nodes.append(Shift(self.reference(moved), int(by)))
        self.advance()

    def children(self) -> Iterator[Node]:
        """The indented lines after ``series``."""
        self.advance()
        while self.line.startswith("  "):
            yield self.reference(self.line[2:])
            self.advance()

    def reference(self, text: str) -> Node:
        """An action, or a node by its number."""
        if not text.startswith("@"):
            return _read_action(text)
        number = _number(text[1:])
        if not 0 <= number < len(self.nodes):
            raise _Unreadable(f"a node defined above, @0 to @{len(self.nodes) - 1}")
        return self.nodes[number]

    def rest_after(self, word: str) -> str:
        """What follows ``word``, with which the line must start."""
        if not self.line.startswith(word):
            raise _Unreadable(f"{word.strip()!r}")
        return self.line[len(word) :]


def _value_text(value: Value) -> str:
    return f"{value.kind.name} {_number_text(value.index, value.part)}"


def _number_text(index: int, part: int) -> str:
    return f"{index}.{part}" if part else str(index)


def _action_text(action: Action) -> str:
    if isinstance(action, Update):
        where = "" if action.tier is Tier.DEVICE else f" {action.tier.name}"
        return f"Update {_number_text(action.block, action.part)}{where}"
    words = [type(action).__name__]
    for name in type(action).__match_args__:
        field = getattr(action, name)
        words.append(_value_text(field) if isinstance(field, Value) else getattr(field, "name", None) or str(field))
    return " ".join(words)


def _read_action(text: str) -> Action:
    words = _words(text)
    kind = _NAMES.get(words.pop())
    action: Action
    if kind is Forward:
        action = Forward(_read_number(words), _read_number(words))
    elif kind is Record or kind is Backward or kind is Keep or kind is KeepInside or kind is Restore:
        action = kind(_read_number(words))
    elif kind is Update:
        action = Update(*_read_parted(words), *([_read_tier(words)] if words else []))
    elif kind is Offload or kind is Prefetch:
        action = kind(_read_value(words), _read_tier(words), _read_tier(words))
    elif kind is Wait or kind is Free:
        action = kind(_read_value(words), _read_tier(words))
    elif kind is Phase:
        action = Phase(_named(PhaseKind.__members__, words, "a phase"))
    else:
        raise _Unreadable(f"an action ({', '.join(_NAMES)}) or @ and the number of a node")
    _check_empty(words)
    return action


def _words(text: str) -> list[str]:
    """The words of ``text``, last first."""
    return text.split(" ")[::-1]


def _read_number(words: list[str]) -> int:
    return _number(words.pop() if words else "")


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise _Unreadable("a whole number")
    return int(text)


def _read_value(words: list[str]) -> Value:
    kind = _named(Kind.__members__, words, "a kind of value")
    return Value(kind, *_read_parted(words))


def _read_parted(words: list[str]) -> tuple[int, int]:
    """A number and a part of it, 0 where none is said."""
    index, dot, part = (words.pop() if words else "").partition(".")
    return _number(index), _number(part) if dot else 0


def _read_tier(words: list[str]) -> Tier:
    return _named(Tier.__members__, words, "a tier")


def _named(members: Mapping[str, _T], words: list[str], what: str) -> _T:
    found = members.get(words.pop() if words else "")
    if found is None:
        raise _Unreadable(f"{what} ({', '.join(members)})")
    return found


def _check_empty(words: list[str]) -> None:
    if words:
        raise _Unreadable("nothing more in this line")
