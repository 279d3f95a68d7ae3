"""`Schedule`: a tree of actions, so that ten million steps cost no more memory than ten.

A node is an action, a `Series` of nodes, a `Repeat` of one node, or a `Shift` of one node to other stages.
Nodes are immutable and may be shared; every walk here is iterative, since trees may be deep.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from tapestream.errors import ScheduleError
from tapestream.ir.actions import Action, Forward, Record, Tier, Value, shifted


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Children one after the other."""

    children: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """``body`` run ``count`` times, the i-th time ``i * shift`` stages later (``shift`` may be negative)."""

    body: "Node"
    count: int
    shift: int = 0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ScheduleError(f"Repeat: count must be at least 0, not {self.count}")


@dataclass(frozen=True, slots=True, eq=False)
class Shift:
    """``body`` run ``by`` stages later: how one sub-schedule serves many places."""

    body: "Node"
    by: int


Node: TypeAlias = Action | Series | Repeat | Shift


def series(*nodes: Node) -> Node:
    """The nodes one after the other; a single node stays itself."""
    return nodes[0] if len(nodes) == 1 else Series(nodes)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What to do, in order, in one training step of a chain of ``stages`` stages.

    ``resident``: where parameters, gradients, buffers and optimizer state are when a step starts and when it ends
    (pairs of value and tier); a value that is not named starts nowhere. ``planner``: who made it. Iteration is lazy and
    repeatable. Two schedules are equal if their trees are.
    """

    root: Node
    stages: int
    resident: tuple[tuple[Value, Tier], ...] = ()
    planner: str = ""
    rows: list[object] = field(default_factory=list, init=False, repr=False)
    """What `lowering.lowered` has made of it."""

    @classmethod
    def of(cls, actions: Iterable[Action], stages: int, **rest: object) -> "Schedule":
        """A flat schedule from actions in order."""
        return cls(Series(tuple(actions)), stages, **rest)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Action]:
        return iterate(self.root)

    @property
    def size(self) -> int:
        """How many actions iteration yields, counted on the tree."""
        sizes: dict[int, int] = {}
        for node in distinct_trees(self.root):
            below = sum(sizes[id(one)] if type(one) in _TREES else 1 for one in children_of(node))
            sizes[id(node)] = below * node.count if isinstance(node, Repeat) else below
        return sizes.get(id(self.root), 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        mine = (self.stages, self.resident, self.planner)
        if mine != (other.stages, other.resident, other.planner):
            return False
        numbers: dict[object, int] = {}
        return _number(self.root, numbers) == _number(other.root, numbers)

    def __hash__(self) -> int:
        return hash((self.stages, self.resident, self.planner, self.size))


_TREES = frozenset((Series, Repeat, Shift))


def iterate(root: Node) -> Iterator[Action]:
    """The actions below ``root`` in order, lazily, with a stack as deep as the tree."""
    stack: list[tuple[Iterator[Node], int]] = [(iter((root,)), 0)]
    while stack:
        nodes, offset = stack[-1]
        for node in nodes:
            if type(node) not in _TREES:  # nearly all are
                yield shifted(node, offset) if offset else node  # type: ignore[arg-type,misc]
                continue
            at = offset
            while isinstance(node, Shift):
                at, node = at + node.by, node.body
            if isinstance(node, Series):
                stack.append((iter(node.children), at))
                break
            if not isinstance(node, Repeat):
                yield shifted(node, at)
            elif isinstance(node.body, (Series, Repeat, Shift)):
                stack.append((_copies(node.body, node.count, node.shift), at))
                break
            else:
                for i in range(node.count):
                    yield shifted(node.body, at + i * node.shift)
        else:
            stack.pop()


def _copies(body: Node, count: int, shift: int) -> Iterator[Node]:
    return (Shift(body, i * shift) if shift and i else body for i in range(count))


def distinct_nodes(root: Node) -> Iterator[Node]:
    """Every distinct node object once, children before parents."""
    if type(root) not in _TREES:
        yield root
    seen: set[int] = set()
    for node in distinct_trees(root):
        for child in children_of(node):
            if type(child) not in _TREES and id(child) not in seen:
                seen.add(id(child))
                yield child
        yield node


def distinct_trees(root: Node) -> Iterator[Node]:
    """Every distinct node object that is no action once, children before parents. Of a flat schedule that is one."""
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(root, False)] if type(root) in _TREES else []
    while stack:
        node, expanded = stack.pop()
        if expanded:
            yield node
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        stack.append((node, True))
        stack.extend((child, False) for child in children_of(node) if type(child) in _TREES and id(child) not in seen)


def children_of(node: Node) -> "tuple[Node, ...]":
    """The nodes directly below."""
    match node:
        case Series(children):
            return children
        case Repeat(body) | Shift(body):
            return (body,)
        case _:
            return ()


def _number(root: Node, numbers: dict[object, int]) -> int:
    """A number that two trees share exactly when they are equal (hash consing, linear in distinct nodes)."""
    local: dict[int, int] = {}
    for node in distinct_nodes(root):
        match node:
            case Series(children):
                key: object = ("series", tuple(local[id(child)] for child in children))
            case Repeat(body, count, shift):
                key = ("repeat", local[id(body)], count, shift)
            case Shift(body, by):
                key = ("shift", local[id(body)], by)
            case _:
                key = node
        local[id(node)] = numbers.setdefault(key, len(numbers))
    return local[id(root)]


def run_once(schedule: Schedule, most: int = 100_000) -> frozenset[int]:
    """Stages that a schedule of at most ``most`` actions runs exactly once; none for a longer one, which is not
    walked.
    """
    if schedule.size > most:
        return frozenset()
    runs: dict[int, int] = {}
    for action in schedule:
        match action:
            case Forward(start, stop):
                for k in range(start, stop):
                    runs[k] = runs.get(k, 0) + 1
            case Record(k):
                runs[k] = runs.get(k, 0) + 1
            case _:
                pass
    return frozenset(k for k, count in runs.items() if count == 1)
