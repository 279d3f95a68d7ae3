"""Actions, schedules and their text form. Standard library only."""

from tapestream.ir.actions import (
    MEMORIES,
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
    shifted,
)
from tapestream.ir.schedule import (
    Node,
    Repeat,
    Schedule,
    Series,
    Shift,
    children_of,
    distinct_nodes,
    iterate,
    series,
)
from tapestream.ir.text import dumps, loads
from tapestream.ir.timeline import Span, Timeline

__all__ = [
    "MEMORIES", "Action", "Backward", "Forward", "Free", "Keep", "KeepInside", "Kind", "Node", "Offload", "Phase",
    "PhaseKind", "Prefetch", "Record", "Repeat", "Restore", "Schedule", "Series", "Shift", "Span", "Tier", "Timeline",
    "Update", "Value", "Wait", "children_of", "distinct_nodes", "dumps", "iterate", "loads", "series", "shifted",
]  # fmt: skip
