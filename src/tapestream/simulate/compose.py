"""Judging a tree without unrolling it: what a node does is worked out once per situation and then reused.

For equal stages without parameter blocks, the rules of docs/ir.md do not depend on where a node is shifted to. All that
a node can see of the world is its *situation*: the live state and which states are kept and stages recorded within the
states that it touches, relative to its shift. Equal situations give equal effects, so the effect is kept and applied
again. `Repeat` is first rewritten as repeated doubling. Exact: whatever does not repeat is simply walked.
"""

from dataclasses import dataclass
from typing import TypeAlias

from tapestream.costs import Profile
from tapestream.ir import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Node,
    Phase,
    PhaseKind,
    Record,
    Repeat,
    Restore,
    Schedule,
    Series,
    Shift,
    Tier,
    children_of,
    distinct_nodes,
)
from tapestream.simulate.explain import sizes_of
from tapestream.simulate.marks import Cut
from tapestream.simulate.walk import OUTSIDE, Live, Tally, Walk

_NOTHING = -(1 << 100)  # less than any number of bytes
_SMALLEST = 12  # walking fewer actions than this is cheaper than looking them up
Situation: TypeAlias = tuple[Live, Cut, Cut, tuple[int, PhaseKind | None] | None]


@dataclass(frozen=True, slots=True)
class Effect:
    """What a node does in a situation; bytes and positions relative to those at its start."""

    live: Live
    kept: Cut
    tape: Cut
    nbytes: int
    peak: int
    peak_position: int
    tally: Tally


@dataclass(slots=True)
class Frame:
    """A node whose children are being walked; ``outer`` is the peak (bytes, position) before it."""

    node: Series
    offset: int
    key: "tuple[int, Situation] | None"
    outer: tuple[int, int]
    nbytes: int
    position: int
    tally: Tally
    child: int = 0


def composable(schedule: Schedule, profile: Profile) -> bool:
    """True when `compose` may judge this and is likely to be faster than walking all actions."""
    if not profile.is_uniform or schedule.resident:
        return False
    cost = profile.stages[0]
    if cost.block is not None or cost.cotangent_bytes != cost.output_nbytes:
        return False
    nodes = 0
    for node in distinct_nodes(schedule.root):
        nodes += 1
        match node:
            case Free(value, tier):
                if value.kind is not Kind.STATE or value.part or tier is not Tier.DEVICE:
                    return False
            case Series() | Repeat() | Shift() | Forward() | Record() | Backward() | Keep() | Restore() | Phase():
                pass
            case _:
                return False
    return schedule.size > 4 * nodes


def compose(schedule: Schedule, walk: Walk) -> None:
    """Judge the tree. Raises RuleBroken, ``walk.position`` being that of the offending action."""
    _run(_doubled(schedule.root), walk)
    walk.end()


def _run(root: Node, walk: Walk) -> None:
    sizes, windows, turning = sizes_of(root), _windows(root), _with_backward(root)
    effects: dict[tuple[int, Situation], Effect] = {}
    stack = [Frame(Series((root,)), 0, None, (0, 0), 0, 0, walk.tally())]
    while stack:
        frame = stack[-1]
        if frame.child == len(frame.node.children):
            stack.pop()
            if frame.key is not None:
                effects[frame.key] = _effect_of(frame, walk, windows[id(frame.node)])
            if frame.outer[0] >= walk.peak:
                walk.peak, walk.peak_position = frame.outer
            continue
        node, offset = frame.node.children[frame.child], frame.offset
        frame.child += 1
        while isinstance(node, Shift):
            offset += node.by
            node = node.body
        if not isinstance(node, Series):
            assert not isinstance(node, Repeat)
            walk.obey(node, offset)
            continue
        window, key = windows[id(node)], None
        if window and sizes[id(node)] >= _SMALLEST:
            low, high = window[0] + offset, window[1] + offset
            if low >= 0 and high <= walk.n:
                key = (id(node), _situation(walk, low, high, id(node) in turning))
                if effect := effects.get(key):
                    _apply(effect, walk, low, high, sizes[id(node)])
                    continue
        outer = (walk.peak, walk.peak_position)
        if key:
            walk.peak = _NOTHING
        stack.append(Frame(node, offset, key, outer, walk.nbytes, walk.position, walk.tally()))


def _situation(walk: Walk, low: int, high: int, turning: bool) -> Situation:
    """All that actions on states ``low..high`` can see, relative to ``low``; ``turning``: one is a Backward."""
    live = walk.live
    if live is not None:
        live = live - low if low <= live <= high else OUTSIDE - walk.held_besides_live(live)
    due = (walk.next_backward - low, walk.phase) if turning else None
    return live, walk.kept.cut(low, high + 1), walk.tape.cut(low - 1, high + 1), due


def _effect_of(frame: Frame, walk: Walk, window: tuple[int, int] | None) -> Effect:
    assert window
    low, high = window[0] + frame.offset, window[1] + frame.offset
    live = walk.live
    if live is not None:
        live = live - low if low <= live <= high else OUTSIDE
    return Effect(
        live,
        walk.kept.cut(low, high + 1),
        walk.tape.cut(low - 1, high + 1),
        walk.nbytes - frame.nbytes,
        walk.peak - frame.nbytes,
        walk.peak_position - frame.position,
        tuple(now - before for now, before in zip(walk.tally(), frame.tally, strict=True)),
    )


def _apply(effect: Effect, walk: Walk, low: int, high: int, size: int) -> None:
    if effect.live is None:
        walk.live = None
    elif effect.live > OUTSIDE:
        walk.live = effect.live + low
    walk.kept.paste(low, high + 1, effect.kept)
    walk.tape.paste(low - 1, high + 1, effect.tape)
    if walk.nbytes + effect.peak > walk.peak:
        walk.peak = walk.nbytes + effect.peak
        walk.peak_position = walk.position + effect.peak_position
    walk.nbytes += effect.nbytes
    walk.position += size
    walk.add(effect.tally)


def _windows(root: Node) -> dict[int, tuple[int, int] | None]:
    """The first and last state that each node touches; None for a node with a Phase, which does not shift."""
    windows: dict[int, tuple[int, int] | None] = {}
    for node in distinct_nodes(root):
        match node:
            case Series(children):
                inner = [windows[id(child)] for child in children]
                found = [window for window in inner if window]
                windows[id(node)] = (
                    (min(low for low, _ in found), max(high for _, high in found))
                    if found and len(found) == len(inner)
                    else None
                )
            case Shift(body, by):
                window = windows[id(body)]
                windows[id(node)] = window and (window[0] + by, window[1] + by)
            case _:
                assert not isinstance(node, Repeat)
                windows[id(node)] = _touched(node)
    return windows


def _touched(action: Action) -> tuple[int, int] | None:
    match action:
        case Forward(start, stop):
            return min(start, stop), max(start, stop)
        case Record(stage) | Backward(stage):
            return stage, stage + 1
        case Keep(stage) | Restore(stage):
            return stage, stage
        case Free(value):
            return value.index, value.index
        case _:
            return None


def _with_backward(root: Node) -> set[int]:
    """The ``id`` of every node below which there is a Backward."""
    found: set[int] = set()
    for node in distinct_nodes(root):
        if isinstance(node, Backward) or any(id(child) in found for child in children_of(node)):
            found.add(id(node))
    return found


def _doubled(root: Node) -> Node:
    """The same actions in the same order, every `Repeat` written as pairs of pairs of .. of its body."""
    fresh: dict[int, Node] = {}
    for node in distinct_nodes(root):
        match node:
            case Series(children):
                fresh[id(node)] = Series(tuple(fresh[id(child)] for child in children))
            case Shift(body, by):
                fresh[id(node)] = Shift(fresh[id(body)], by)
            case Repeat(body, count, shift):
                power, parts, done = fresh[id(body)], [], 0
                for bit in range(count.bit_length()):
                    if count >> bit & 1:
                        parts.append(Shift(power, done * shift))
                        done += 1 << bit
                    power = Series((power, Shift(power, shift << bit)))
                fresh[id(node)] = Series(tuple(parts))
            case _:
                fresh[id(node)] = node
    return fresh[id(root)]
