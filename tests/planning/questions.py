"""Training steps on machines of three tiers, drawn at random, and what an engineer would do by hand."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.errors import TapestreamError
from tapestream.ir import (
    MEMORIES,
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Schedule,
    Tier,
    Value,
    Wait,
)
from tapestream.passes import hoist, stream_parameters
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan
from tapestream.simulate import simulate

DEVICE, HOST, DISK = MEMORIES
PAIRS = {"card": 1.1, "ram": 1.1, "link": 1.2, "disk": 1.2, "flops": 1.2}
"""What more of a resource is."""


@dataclass(frozen=True, slots=True)
class Question:
    """``blocks`` of a transformer of so many ``parameters`` and ``width``, trained on so many ``tokens`` a step in 16
    bits, with ``state`` bytes of the optimizer for each parameter. ``card``, ``ram``: bytes; ``link``, ``disk``: bytes
    a second (writes are a third slower); ``flops``: a second."""

    blocks: int
    width: int
    tokens: int
    state: int
    update: Any
    card: float
    ram: float
    link: float
    disk: float
    flops: float

    @property
    def parameters(self) -> int:
        """Of one block."""
        return 12 * self.width**2

    @property
    def profile(self) -> Profile:
        """What a step costs."""
        seconds, state = 2 * self.parameters * self.tokens / self.flops, 2 * self.width * self.tokens
        weights, parts = 2 * self.parameters, (4 * self.parameters,) * (self.state // 4)
        block = BlockCost(
            weights,
            gradient_nbytes=weights,
            optimizer_state_nbytes=sum(parts),
            update_seconds=self.parameters * (8 + 2 * self.state) / 1e12,
            state_parts=parts,
        )
        stages = [
            StageCost(seconds, 2 * seconds, state, 15 * state, forward_extra_nbytes=8 * state, block=k)
            for k in range(self.blocks)
        ]
        return Profile(stages, state, (block,) * self.blocks)

    @property
    def budget(self) -> Budget:
        """Of the card and of RAM."""
        return Budget(int(self.card), host=int(self.ram))

    @property
    def machine(self) -> Machine:
        """The disk is reached through RAM."""
        link = Link(self.link)
        disk = {(DISK, HOST): Link(self.disk), (HOST, DISK): Link(self.disk * 2 / 3)}
        return Machine({(HOST, DEVICE): link, (DEVICE, HOST): link} | disk)

    def plan(self) -> Plan | None:
        """The planner's answer, None where nothing fits."""
        return _or_none(lambda: make_plan(self.profile, self.budget, self.machine, update=self.update))

    def with_more(self, what: str) -> "Question":
        """The same on a machine that has more of one thing."""
        return replace(self, **{what: getattr(self, what) * PAIRS[what]})


def drawn(seed: int) -> Question:
    """A question."""
    pick = random.Random(seed)
    blocks, width, state = pick.choice((8, 16, 32)), pick.choice((2048, 4096, 8192)), pick.choice((4, 12))
    parameters = 12 * width**2
    block = parameters * (2 + state)
    return Question(
        blocks, width, pick.choice((512, 2048, 8192, 32768)), state, pick.choice(("step", "backward")),
        card=pick.uniform(0.05, 0.5) * blocks * block + 4 * block + 30 * width * 8192,
        ram=pick.uniform(0.2, 1.2) * blocks * block + 8 * state * parameters,
        link=pick.choice((12e9, 25e9, 50e9)),
        disk=pick.choice((1.5e9, 3e9, 6e9)),
        flops=pick.choice((60e12, 140e12, 600e12)),
    )  # fmt: skip


def recipes(question: Question) -> Iterator[tuple[str, float]]:
    """What is done by hand, with its seconds where it fits: everything stored, a state kept for each block or for every
    fourth, or all states in RAM; with weights that stay on the card (as ZeRO-Offload has it) or come and go."""
    n = question.blocks
    weights = frozenset(Value(Kind.PARAMETERS, k) for k in range(n))
    for name, every, moved in (
        ("everything stored", 0, False), ("each state in RAM", 1, True),
        ("each state kept", 1, False), ("every fourth state kept", 4, False),
    ):  # fmt: skip
        tape = _tape(n, every, moved=moved)
        for home, resident in ((HOST, weights), (HOST, frozenset()), (DISK, weights), (DISK, frozenset())):
            seconds = _or_none(lambda home=home, resident=resident, tape=tape: _seconds(question, tape, home, resident))
            if seconds is not None:
                yield name, seconds


def _seconds(question: Question, tape: Schedule, home: Tier, resident: frozenset[Value]) -> float:
    terms = question.profile, question.budget, question.machine
    streamed = stream_parameters(tape, *terms, home=home, update=question.update, resident=resident)
    profile, budget, machine = terms
    return simulate(hoist(streamed, *terms), profile, machine, budget).makespan_seconds


def _tape(n: int, every: int, *, moved: bool) -> Schedule:
    there: list[Action] = [] if every else [Record(k) for k in range(n)]
    back: list[Action] = [] if every else [Backward(k) for k in reversed(range(n))]
    for first in range(0, n, every) if every else ():
        stages = range(first, min(n, first + every))
        state, leaves = Value(Kind.STATE, first), moved and first > 0
        goes: list[Action] = [Wait(state, HOST), Free(state, DEVICE)] if leaves else []
        comes: list[Action] = [Prefetch(state, HOST, DEVICE), Wait(state, DEVICE), Free(state, HOST)] if leaves else []
        there += [
            Keep(first),
            *([Offload(state, DEVICE, HOST)] if leaves else []),
            Forward(first, stages[-1] + 1),
            *goes,
        ]
        again = [*map(Record, stages), *map(Backward, reversed(stages))]
        back = [*comes, Restore(first), Free(state, DEVICE), *again, *back]
    return Schedule.of([Phase(PhaseKind.FORWARD), *there, Phase(PhaseKind.BACKWARD), *back], n)


def _or_none(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except TapestreamError:
        return None
