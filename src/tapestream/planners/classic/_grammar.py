"""Schedules as a grammar: a part is a row of actions and smaller parts, and equal parts share one node."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tapestream.ir import Node, Series, Shift

Part = TypeVar("Part", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Call(Generic[Part]):
    """A part, its first stage being ``offset`` of the part around it."""

    part: Part
    offset: int = 0


def grow(root: Part, expand: Callable[[Part], "Sequence[Node | Call[Part]]"]) -> Node:
    """The tree of ``root``; ``expand`` takes each distinct part apart once. No recursion, whatever the depth."""
    rows: dict[Part, Sequence[Node | Call[Part]]] = {}
    nodes: dict[Part, Node] = {}
    stack = [root]
    while stack:
        part = stack[-1]
        if part in nodes:
            stack.pop()
            continue
        row = rows.get(part) or rows.setdefault(part, expand(part))
        missing = [item.part for item in row if isinstance(item, Call) and item.part not in nodes]
        if missing:
            stack += missing
            continue
        nodes[part] = Series(tuple(_shifted(nodes[i.part], i.offset) if isinstance(i, Call) else i for i in row))
        del rows[stack.pop()]
    return nodes[root]


def _shifted(node: Node, by: int) -> Node:
    return Shift(node, by) if by else node
